#!/bin/sh
# Slurm's Prolog: a node that fails its check gets no job (docs/hooks.md). Install it as root on a disk of the node:
#   Prolog=/usr/local/sbin/rrl-prolog.sh        (slurm.conf; with PrologFlags=Alloc it runs before the first step)
#   SchedulerParameters=nohold_on_prolog_fail   (else the job that met the failing node is requeued AND HELD: it does
#                                                not start elsewhere until somebody runs scontrol release JOBID)
#
# Where an epilog or the HealthCheckProgram has made a full check within $FRESH, and the job's GPUs were found free after
# their last job, nothing is checked: that takes less than a second.
#
# A prolog that does not end with 0 drains the node and requeues the job. So only FAIL does: not WARN, not UNKNOWN, not a
# check that could not be made (no Python, a mistake in the rules, no answer in time). Nor does FAIL where hooks have
# drained too many nodes lately ([hooks] in health.toml), or Slurm does not say how many: the job then starts.

RRL=/opt/rrl/bin/rrl            # on a disk of the node: neither a home nor a shared file system may be in its path
CONFIG=/etc/rrl/health.toml     # the site's rules, if there are any
HISTORY=                        # folder of the site's history, if findings are to be recorded there
METRICS=                        # file of node_exporter's textfile collector, such as /var/lib/node_exporter/rrl.prom
FRESH=30min

PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
[ -r "$CONFIG" ] && export RRL_HEALTH_CONFIG="$CONFIG"

# SIGTERM first: the check ends its readers in good order. stderr is dropped: a reader that hangs in the kernel keeps it
# open, and slurmd, or the $( ) below, would wait for its end. To be sure of a hung mount takes 15 s of the 25.
said=$(timeout -k 10 60 "$RRL" health check --prolog --fresh "$FRESH" --within 25s \
    ${HISTORY:+--record --history "$HISTORY"} ${METRICS:+--prometheus "$METRICS"} 2>/dev/null)
code=$?
line=$(printf '%s\n' "$said" | head -n 1)
unwritten=$(printf '%s\n' "$said" | grep -E '^not (recorded|written|remembered): ') && logger -t rrl-prolog "$unwritten"
case $code:$line in                                            # word and code: a shell or Python that fails says 2 too
    "2:FAIL "*)
        why=$(printf '%s' "${line#FAIL }" | tr -c 'A-Za-z0-9 .,:;/@_()+-' '_' | cut -c1-150)
        if outcome=$(timeout -k 5 60 "$RRL" health drain-node --why "$why" 2>&1); then
            printf '%s\n' "$said" >&2
            exit 1
        fi
        logger -p daemon.warning -t rrl-prolog "FAIL, but the node stays in use: $outcome ($why)" ;;
    0:OK* | 0:WARN* | 0:UNKNOWN*) ;;
    *) logger -t rrl-prolog "this node was not checked (exit code $code): see $RRL health check" ;;
esac
exit 0
