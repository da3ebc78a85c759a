#!/bin/sh
# The node of a container; arguments are those of `aenv up`. All processes end with the container, so that a stop pauses the sandboxes
# first: give it time (`--stop-timeout 300`), or what ran is lost. A server that was killed is started again: sandboxes go on meanwhile.
set -u
record=${AENV_NODE_RUN:-/run/agentenv}/server.pid

stop() {
  trap '' TERM INT
  echo "pausing the sandboxes" >&2
  aenv down
  exit $?
}

pause() {
  sleep "$1" &
  wait $!
}

trap stop TERM INT
while :; do
  aenv up "$@" &
  wait $!
  status=$?
  while aenv ls >/dev/null 2>&1; do pause 5; done # `aenv reload` has put another in its place
  if [ "$status" = 0 ] && [ ! -e "$record" ]; then exit 0; fi # `aenv down`
  pause 1
done
