#!/bin/sh
# Keeps the code interpreter running in a guest, as the API's ordinary user: whatever ends it, it starts anew a second later.
here=$(dirname "$0")
cd /home/user || exit 1
while :; do
  setpriv --reuid=user --regid=user --init-groups env -i HOME=/home/user USER=user LOGNAME=user SHELL=/bin/bash LANG=C.UTF-8 \
    PATH=/home/user/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    python3 -c 'import sys; sys.path.insert(0, sys.argv[1]); from importlib import import_module as i; i(sys.argv[2]).entry()' \
    "$(dirname "$here")" "$(basename "$here").server"
  sleep 1
done
