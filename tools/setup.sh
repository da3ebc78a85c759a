#!/usr/bin/env bash
# Bring a Debian machine and this checkout to the point where `aenv up` works. Changes nothing that is there already.
# With the word `tests`: also what the tests compare with (a registry, umoci); with `bench`: what the bench does (nginx, wrk);
# with `lab`: what the lab's QEMU is built with.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
die() { printf 'setup: %s\n' "$1" >&2; printf '  hint: %s\n' "$2" >&2; exit 1; }

# --- Debian packages: what the node runs on, and a linker for the native programs -----------------------------------
declare -A package_of=(
  [ip]=iproute2 [nft]=nftables [mmdebstrap]=mmdebstrap [mke2fs]=e2fsprogs [zstd]=zstd [lz4]=lz4 [gcc]=gcc
  [make]=make [curl]=curl [skopeo]=skopeo
)
if [ "${1:-}" = tests ]; then
  package_of+=([umoci]=umoci [docker-registry]=docker-registry [htpasswd]=apache2-utils [busybox]=busybox-static [systemd-analyze]=systemd [cpio]=cpio)
fi
if [ "${1:-}" = bench ]; then
  package_of+=([nginx]=nginx-light [wrk]=wrk)
fi
declare -A package_with=([/usr/lib/x86_64-linux-gnu/libc.a]=libc6-dev [/usr/share/keyrings/debian-archive-keyring.gpg]=debian-archive-keyring)
if [ "${1:-}" = lab ]; then
  package_of+=([dpkg-source]=dpkg-dev [ninja]=ninja-build [pkg-config]=pkgconf)
  package_with+=([/usr/include/glib-2.0/glib.h]=libglib2.0-dev [/usr/include/seccomp.h]=libseccomp-dev)
  package_with+=([/usr/include/libfdt.h]=libfdt-dev [/usr/include/zlib.h]=zlib1g-dev)
fi
missing=()
for program in "${!package_of[@]}"; do
  PATH="$PATH:/usr/sbin:/sbin" command -v "$program" >/dev/null || missing+=("${package_of[$program]}")
done
for file in "${!package_with[@]}"; do
  [ -e "$file" ] || missing+=("${package_with[$file]}")
done
if [ ${#missing[@]} -gt 0 ]; then
  command -v apt-get >/dev/null || die "missing: ${missing[*]}" "install these with your distribution's package manager"
  [ "$(id -u)" = 0 ] || die "missing: ${missing[*]}" "run \`make setup\` as root once, or: apt-get install ${missing[*]}"
  say "install Debian packages: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  policy=/usr/sbin/policy-rc.d
  if [ ! -e "$policy" ]; then # programs are wanted, not services that start by themselves
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    trap 'rm -f "$policy"' EXIT
  fi
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

# --- Python ----------------------------------------------------------------------------------------------------------
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || die "Python 3.11 or newer is needed" "set PYTHON to one"
if [ ! -x .venv/bin/python ]; then
  say "create the virtual environment .venv"
  "$python" -m venv .venv 2>/dev/null || die "the venv module is missing" "apt-get install python3-venv"
fi
stamp=.venv/.installed-from
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
  say "install the Python packages"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
  touch "$stamp"
fi

# --- native programs ---------------------------------------------------------------------------------------------------
stale() {
  for program in blockd envd imagefs volumed; do [ -x "src/agentenv/_bin/$program" ] || return 0; done
  find native -name target -prune -o -type f \( -name '*.rs' -o -name 'Cargo.*' \) -newer src/agentenv/_bin/envd -print -quit | grep -q .
}
if stale; then
  say "build the native programs (a few minutes the first time)"
  .venv/bin/python tools/build_native.py >&2
  touch src/agentenv/_bin/{blockd,envd,imagefs,volumed}
fi
