#!/bin/sh
# Slurm's Epilog: checks the node after each job, so that the prolog of the next job need not (docs/hooks.md). Install it
# as root on a disk of the node itself:
#   Epilog=/usr/local/sbin/rrl-epilog.sh
#
# The node's resources are given to the next job only after the epilog, which takes 3 to 25 s. It always ends with 0: Slurm
# drains a node whose epilog fails, without the limit of the hooks. A FAIL drains through rrl health drain-node.

RRL=/opt/rrl/bin/rrl            # on a disk of the node: neither a home nor a shared file system may be in its path
CONFIG=/etc/rrl/health.toml     # the site's rules, if there are any
HISTORY=                        # folder of the site's history, if findings are to be recorded there
METRICS=                        # file of node_exporter's textfile collector, such as /var/lib/node_exporter/rrl.prom

PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
[ -r "$CONFIG" ] && export RRL_HEALTH_CONFIG="$CONFIG"

# stderr is dropped: a reader that hangs in the kernel keeps it open, and slurmd, or the $( ), would wait for its end.
said=$(timeout -k 10 60 "$RRL" health check --epilog --remember --within 25s \
    ${HISTORY:+--record --history "$HISTORY"} ${METRICS:+--prometheus "$METRICS"} 2>/dev/null)
code=$?
line=$(printf '%s\n' "$said" | head -n 1)
unwritten=$(printf '%s\n' "$said" | grep -E '^not (recorded|written|remembered): ') && logger -t rrl-epilog "$unwritten"
case $code:$line in                                            # word and code: a shell or Python that fails says 2 too
    "2:FAIL "*)
        why=$(printf '%s' "${line#FAIL }" | tr -c 'A-Za-z0-9 .,:;/@_()+-' '_' | cut -c1-150)
        outcome=$(timeout -k 5 60 "$RRL" health drain-node --why "$why" 2>&1) ||
            logger -p daemon.warning -t rrl-epilog "FAIL, but the node stays in use: $outcome ($why)" ;;
    0:OK* | 0:WARN* | 0:UNKNOWN*) ;;
    *) logger -t rrl-epilog "this node was not checked (exit code $code): see $RRL health check" ;;
esac
exit 0
