# The worker for bash: one shell for all cells of a context, so that variables, functions and the folder stay.
#
# A request is one line on descriptor 3: the number of the execution, then the paths of three files: one to source before the
# cell, the cell, one to source after it. Events go to descriptor 4 as in `python_worker.py`. Neither is open in what a cell
# starts. An interrupt (SIGINT) ends the foreground program and leaves the rest of the cell out.
__aenv_stop() {
  # In a DEBUG trap with extdebug, status 2 is a `return` from the sourced cell; the worker's own lines must go on.
  [[ " ${FUNCNAME[*]} " == *" source "* ]] && return 2
  return 0
}
__aenv_interrupted() {
  __aenv_was_interrupted=1
  shopt -s extdebug
  trap __aenv_stop DEBUG
}
trap __aenv_interrupted INT
printf '{"type": "ready"}\n' >&4
while IFS=' ' read -r -u 3 __aenv_number __aenv_before __aenv_cell __aenv_after; do
  printf '{"type": "number_of_executions", "execution_count": %d}\n' "$__aenv_number" >&4
  trap - DEBUG # an interrupt that came between two cells is for neither
  shopt -u extdebug
  __aenv_was_interrupted=
  source "$__aenv_before" </dev/null 3<&- 4>&-
  (exit "${__aenv_status:-0}")
  source "$__aenv_cell" </dev/null 3<&- 4>&-
  __aenv_status=$?
  trap - DEBUG
  shopt -u extdebug
  trap __aenv_interrupted INT
  source "$__aenv_after" </dev/null 3<&- 4>&-
  if [[ $__aenv_was_interrupted ]]; then
    printf '{"type": "error", "name": "Interrupted", "value": "Execution interrupted", "traceback": ""}\n' >&4
  elif ((__aenv_status)); then
    printf '{"type": "error", "name": "ExitStatus", "value": "%d", "traceback": "the cell ended with status %d"}\n' \
      "$__aenv_status" "$__aenv_status" >&4
  fi
  printf '{"type": "end"}\n' >&4
done
