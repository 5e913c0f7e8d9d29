#!/bin/sh
# Slurm's HealthCheckProgram: drains a node that fails its check, and takes that drain back when it is well again. Slurm
# itself does nothing for this program's exit code. Install it as root on a disk of the node itself:
#   HealthCheckProgram=/usr/local/sbin/rrl-healthcheck.sh
#   HealthCheckInterval=300
#   HealthCheckNodeState=ANY,CYCLE              (CYCLE: not all nodes at once)
#
# Only FAIL drains. WARN, UNKNOWN and a check that could not be made change nothing, but that a WARN is well enough to
# take back a drain of ours. A drain by anybody else is neither overwritten nor taken back: ours begin with $OURS.
# Where hooks have drained too many nodes lately ([hooks] in health.toml), a FAIL does not drain either: a line in the
# system's log says so.

RRL=/opt/rrl/bin/rrl            # on a disk of the node: neither a home nor a shared file system may be in its path
CONFIG=/etc/rrl/health.toml     # the site's rules, if there are any
OURS=rrl:health:

PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:$PATH
export PATH
[ -r "$CONFIG" ] && export RRL_HEALTH_CONFIG="$CONFIG"
node=${SLURMD_NODENAME:-$(hostname -s)}

# Slurm kills this program after 60 s. A reader that hangs in the kernel keeps stderr open, and $( ) would wait for that.
said=$(timeout -k 2 34 "$RRL" health check --within 25s 2>/dev/null)
code=$?
line=$(printf '%s\n' "$said" | head -n 1)
verdict=${line%% *}
case $code$verdict in                                   # word and code agree, or nobody knows
    0OK | 1WARN | 2FAIL) ;;
    3UNKNOWN) exit 0 ;;
    *) logger -t rrl-healthcheck "this node was not checked (exit code $code): see $RRL health check"; exit 0 ;;
esac

shown=$(scontrol show node "$node") || exit 0
reason=$(printf '%s\n' "$shown" | sed -n 's/^ *Reason=//p')
case $(printf '%s\n' "$shown" | sed -n 's/.*State=\([^ ]*\).*/\1/p') in
    *DRAIN*) drained=yes ;;
    *) drained=no ;;
esac

if [ "$verdict" = FAIL ]; then
    case $reason in '' | "$OURS"*) ;; *) exit 0 ;; esac     # drained, down ... for a reason of somebody else's
    why=$(printf '%s' "${line#FAIL }" | tr -c 'A-Za-z0-9 .,:;/@_()+-' '_' | cut -c1-150)
    outcome=$(timeout -k 5 20 "$RRL" health drain-node --node "$node" --why "$why" 2>&1) ||
        logger -p daemon.warning -t rrl-healthcheck "FAIL, but the node stays in use: $outcome ($why)"
elif [ "$verdict" != FAIL ] && [ $drained = yes ]; then
    case $reason in "$OURS"*) scontrol update nodename="$node" state=resume ;; esac
fi
exit 0
