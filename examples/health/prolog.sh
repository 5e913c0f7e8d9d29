#!/bin/sh
# Slurm's Prolog: a node that fails its check gets no job. Install it as root on a disk of the node itself:
#   Prolog=/usr/local/sbin/rrl-prolog.sh        (slurm.conf; with PrologFlags=Alloc it runs before the first step)
#
# A prolog that does not end with 0 drains the node and requeues the job. So only FAIL does: not WARN, not UNKNOWN, not
# a check that could not be made (no Python, a mistake in the rules, no answer in time).

RRL=/opt/rrl/bin/rrl            # on a disk of the node: neither a home nor a shared file system may be in its path
CONFIG=/etc/rrl/health.toml     # the site's rules, if there are any

PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
[ -r "$CONFIG" ] && export RRL_HEALTH_CONFIG="$CONFIG"

# SIGTERM first: it ends its readers in good order. Its stderr goes nowhere, for a reader that hangs in the kernel keeps it
# open, and slurmd, or the $( ) below, would wait for its end.
said=$(timeout -k 10 60 "$RRL" health check --prolog --within 20s 2>/dev/null)
code=$?
line=$(printf '%s\n' "$said" | head -n 1)
case $code:$line in
    "2:FAIL "*) printf '%s\n' "$said" >&2; exit 1 ;;           # word and code: a shell or Python that fails says 2 too
    0:OK* | 0:WARN* | 0:UNKNOWN*) ;;
    *) logger -t rrl-prolog "this node was not checked (exit code $code): see $RRL health check" ;;
esac
exit 0
