#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# fresh_root.sh SUITE: runs the README's two lines, the demo's and the tests', in a clean root of Debian SUITE (bookworm or trixie),
# made by debootstrap. Needs root, debootstrap and the network; says which of them is missing (exit code 77). MIRROR: where from.
# ROOT: where to; it is kept if it was there before.
set -euo pipefail
suite=${1:-}
project=$(cd "$(dirname "$0")/../.." && pwd)
mirror=${MIRROR:-http://deb.debian.org/debian}

usage() { echo "usage: fresh_root.sh bookworm|trixie" >&2; exit 2; }
missing() { echo "fresh_root.sh: cannot run: $*" >&2; exit 77; }

case $suite in
  bookworm | trixie) ;;
  *) usage ;;
esac
((EUID == 0)) || missing "it makes a root and changes into it, so it must be root"
command -v debootstrap >/dev/null || missing "there is no debootstrap (apt-get install debootstrap)"
command -v chroot >/dev/null || missing "there is no chroot"

root=${ROOT:-$(mktemp -d /var/tmp/kvtrim-$suite.XXXXXX)}
made=$([[ -z ${ROOT:-} ]] && echo yes || echo no)
leave() {
  local rc=$?
  umount "$root/proc" 2>/dev/null || true
  [[ $made == no ]] || rm -rf "$root"
  exit "$rc"
}
trap leave EXIT

if [[ ! -e $root/etc/debian_version ]]; then
  debootstrap --variant=minbase "$suite" "$root" "$mirror" || missing "debootstrap failed for $suite from $mirror"
fi
mountpoint -q "$root/proc" || mount -t proc proc "$root/proc" || missing "/proc cannot be mounted in $root"
cp /etc/resolv.conf "$root/etc/resolv.conf"
# A clone, as a reader has one: nothing that lies about in this tree.
rm -rf "$root/kvtrim"
git -C "$project" archive --prefix=kvtrim/ HEAD | tar -x -C "$root"

# The lines as the README has them: those that install packages and run a workflow.
mapfile -t lines < <(grep -E '^\$\(command -v sudo\).*cmake --workflow --preset (demo|test)$' "$project/README.md")
((${#lines[@]} == 2)) || { echo "fresh_root.sh: README.md has ${#lines[@]} such lines, expected 2" >&2; exit 1; }
for line in "${lines[@]}"; do
  echo "=== $suite: $line"
  chroot "$root" /bin/sh -ec "cd /kvtrim && $line"
done
chroot "$root" /bin/sh -c 'cat /etc/debian_version; g++ --version | head -n 1; cmake --version | head -n 1
  dpkg-query -W -f "\${Package} \${Version}\n" catch2 libeigen3-dev'
echo "fresh_root.sh: $suite passed"
