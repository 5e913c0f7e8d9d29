#!/bin/sh
# Slurm's HealthCheckProgram: drains a node that fails its check, and takes that drain back when the node passes again
# (docs/hooks.md). Slurm itself does nothing for this program's exit code. Install it as root on a disk of the node itself:
#   HealthCheckProgram=/usr/local/sbin/rrl-healthcheck.sh
#   HealthCheckInterval=300
#   HealthCheckNodeState=ANY,CYCLE              (CYCLE: not all nodes at once)
#
# Only FAIL drains. WARN, UNKNOWN and a check that could not be made change nothing, except that a WARN suffices to take
# back a drain of the hooks. A drain by anybody else is neither overwritten nor taken back. Where hooks have drained too
# many nodes lately ([hooks] in health.toml), a FAIL does not drain either: a line in the system's log says so.
# slurmctld is asked only if the node fails, or the hooks have drained it, or it was not asked since the node's boot.

RRL=/opt/rrl/bin/rrl            # on a disk of the node: neither a home nor a shared file system may be in its path
CONFIG=/etc/rrl/health.toml     # the site's rules, if there are any
HISTORY=                        # folder of the site's history, if findings are to be recorded there
METRICS=                        # file of node_exporter's textfile collector, such as /var/lib/node_exporter/rrl.prom

PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:$PATH
export PATH
[ -r "$CONFIG" ] && export RRL_HEALTH_CONFIG="$CONFIG"
node=${SLURMD_NODENAME:-$(hostname -s)}

# Slurm kills this program after 60 s. A reader that hangs in the kernel keeps stderr open, and $( ) would wait for that.
said=$(timeout -k 2 36 "$RRL" health check --remember --within 25s \
    ${HISTORY:+--record --history "$HISTORY"} ${METRICS:+--prometheus "$METRICS"} 2>/dev/null)
code=$?
line=$(printf '%s\n' "$said" | head -n 1)
verdict=${line%% *}
unwritten=$(printf '%s\n' "$said" | grep -E '^not (recorded|written|remembered): ') && logger -t rrl-healthcheck "$unwritten"
case $code$verdict in                                   # word and code agree, or nobody knows
    0OK | 1WARN)
        outcome=$(timeout -k 2 18 "$RRL" health undrain-node --node "$node" 2>&1) ||
            logger -t rrl-healthcheck "the node passes its check, but: $outcome" ;;
    2FAIL)
        why=$(printf '%s' "${line#FAIL }" | tr -c 'A-Za-z0-9 .,:;/@_()+-' '_' | cut -c1-150)
        outcome=$(timeout -k 2 18 "$RRL" health drain-node --node "$node" --why "$why" 2>&1) ||
            logger -p daemon.warning -t rrl-healthcheck "FAIL, but the node stays in use: $outcome ($why)" ;;
    3UNKNOWN) ;;
    *) logger -t rrl-healthcheck "this node was not checked (exit code $code): see $RRL health check" ;;
esac
exit 0
