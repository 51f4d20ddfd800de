#!/usr/bin/env bash
# A real Ray cluster by hand, on the machines you have (or one machine, for trying). Nothing to configure.
#   ./local.sh head [SLOTS]                  on the first machine; prints the address
#   ./local.sh join HEAD_IP:6379 [SLOTS]     on each other machine; Ctrl-C there takes it away again
# SLOTS is how many workers the machine takes (default: its cores).
set -euo pipefail
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-disabled}"
usage() { sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2; }
case "${1:-}" in
  head) exec ray start --head --port=6379 --num-cpus="${2:-$(nproc)}" --block ;;
  join) [ $# -ge 2 ] || usage; exec ray start --address="$2" --num-cpus="${3:-$(nproc)}" --block ;;
  *) usage ;;
esac
