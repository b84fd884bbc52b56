#!/usr/bin/env bash
# Do the README's two commands hold on anyone's machine? By hand and before a release; hours.
#
#   tests/anywhere.sh                     every case, each in a fresh clone of this tree's HEAD
#   tests/anywhere.sh words busy          these cases
#   tests/anywhere.sh --together          all that go together in one clone, at once; then the rest
#   tests/anywhere.sh user -- COMMAND …   another command than the two, in the clone's folder
#
# A table at the end; exit code 1 if any fails. Logs and pip's cache are kept in the folder that it names.
set -uo pipefail

ROOT=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
WORK=$(mktemp -d /tmp/firecaffe-anywhere.XXXXXX)
NOBODY=65534

# What a case may say: the clone's folder below $PLACE, variables, words before a command (outermost
# first), umask, user, busy processes beside. One that cannot be here says why and is skipped.
begin() {
  FOLDER=clone VARIABLES=() AROUND=() UMASK=022 UID_OF=$(id -u) BESIDE=0 HOME_IS=writable
}

named()    { FOLDER=firecaffe; }
words()    { FOLDER="Größe 1/clone"; }
user()     { needs_root && UID_OF=$NOBODY; }
tmpdir()   { VARIABLES+=("TMPDIR=$PLACE/temporary files"); mkdir -p -m 1777 "$PLACE/temporary files"; }
private()  { UMASK=077; }
ipv4()     { needs_root && has ip && AROUND+=(unshare --net sh -c "$IPV4" sh); }
c_locale() { VARIABLES+=(LANG=C LC_ALL= LC_CTYPE=); }
home()     { HOME_IS=read-only; }
memory()   { needs_root && AROUND+=(unshare --mount sh -c "$MEMORY" sh); }
one_core() { has taskset && AROUND+=(taskset --cpu-list 0); }
busy()     { BESIDE=4; }

IPV4='ip link set lo up && echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6 && exec "$@"'
MEMORY='mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
READ_ONLY='mount -t tmpfs -o ro tmpfs "$0" && exec "$@"'

declare -A SAYS=(
  [named]="a folder named firecaffe" [words]="a folder with a space and an umlaut"
  [user]="a user who is not root" [tmpdir]="TMPDIR elsewhere" [private]="umask 077"
  [ipv4]="no IPv6, no network but the host's own" [c_locale]="LANG=C" [home]="a HOME that is read-only"
  [memory]="/dev/shm of 64 MB" [one_core]="one core" [busy]="four busy processes beside"
)
CASES=(named words user tmpdir private ipv4 c_locale home memory one_core busy)
TOGETHER=(words user tmpdir private c_locale home ipv4 memory)

needs_root() { [ "$(id -u)" = 0 ] && has unshare && has setpriv || skip "needs Linux and root"; }
has()        { command -v "$1" > /dev/null || skip "needs $1"; }
skip()       { SKIPPED=$1; return 1; }

# In the clone, as the case's user and with its variables.
inside() {
  local before=() home="$PLACE/home"
  if [ "$UID_OF" != "$(id -u)" ]; then
    before=(setpriv "--reuid=$UID_OF" "--regid=$UID_OF" --clear-groups)
  fi
  (cd "$CLONE" && umask "$UMASK" && "${AROUND_NOW[@]}" "${before[@]}" \
    env "HOME=$home" "PIP_CACHE_DIR=$WORK/pip.$UID_OF" "${VARIABLES[@]}" "$@")
}

# What a command came to, in the table's words; its log is LOG.
outcome() {
  local log=$1; shift
  if inside "$@" > "$log" 2>&1; then echo passed; else
    echo failed
    { echo "--- $*: $log"; tail -n 40 "$log"; } >&2
  fi
}

run() {
  local name=$1; shift
  local begun=$SECONDS demo=- test=- beside=() each
  PLACE="$WORK/$name" && mkdir "$PLACE" && mkdir -m 755 "$PLACE/home"
  begin
  for each in "$@"; do
    SKIPPED=
    "$each" || ROWS+=("$each|skipped|$SKIPPED|-")
  done
  [ -z "$SKIPPED" ] || [ $# -gt 1 ] || return
  CLONE="$PLACE/$FOLDER"
  (umask "$UMASK"; git clone --quiet --config advice.detachedHead=false "$ROOT" "$CLONE") || exit 1
  mkdir -p "$WORK/pip.$UID_OF"
  chown -R "$UID_OF" "$PLACE" "$WORK/pip.$UID_OF" 2> /dev/null
  AROUND_NOW=()  # there may be no network in what is around
  if [ "$(outcome "$WORK/$name.install.log" make .venv/installed-dev)" = passed ]; then
    if [ "$HOME_IS" = read-only ]; then
      # Root may write where nobody may; then it is the file system that says no.
      chmod 555 "$PLACE/home"
      [ "$(id -u)" != 0 ] || AROUND+=(unshare --mount sh -c "$READ_ONLY" "$PLACE/home")
    fi
    AROUND_NOW=("${AROUND[@]}")
    for ((each = 0; each < BESIDE; each++)); do
      (while :; do :; done) & beside+=($!)
    done
    if [ "${#COMMAND[@]}" = 0 ]; then
      demo=$(outcome "$WORK/$name.demo.log" make demo)
      test=$(outcome "$WORK/$name.test.log" make test)
    else
      test=$(outcome "$WORK/$name.log" "${COMMAND[@]}")
    fi
    [ "$BESIDE" = 0 ] || { kill "${beside[@]}"; wait "${beside[@]}"; } 2> /dev/null
  else
    test="failed (installation)"
  fi
  ROWS+=("$name|$demo|$test|$(((SECONDS - begun + 30) / 60))")
  [[ "$demo $test" = *failed* ]] && FAILED=1 || rm -rf "$PLACE"
}

ROWS=() FAILED=0 COMMAND=() chosen=() together=0
while [ $# -gt 0 ]; do
  case $1 in
    --together) together=1 ;;
    --) shift; COMMAND=("$@"); break ;;
    *) [ -n "${SAYS[$1]:-}" ] || { echo "no case $1; the cases are ${CASES[*]}" >&2; exit 2; }
       chosen+=("$1") ;;
  esac
  shift
done
chmod 755 "$WORK"
[ "${#chosen[@]}" -gt 0 ] || chosen=("${CASES[@]}")
at_once=()
for each in "${chosen[@]}"; do
  if [ "$together" = 1 ] && [[ " ${TOGETHER[*]} " = *" $each "* ]]; then at_once+=("$each"); fi
done
[ "${#at_once[@]}" = 0 ] || run together "${at_once[@]}"
for each in "${chosen[@]}"; do
  [[ " ${at_once[*]} " = *" $each "* ]] || run "$each" "$each"
done
echo "in $WORK:"
{
  echo "case|demo|test|minutes|what"
  for row in "${ROWS[@]}"; do echo "$row|${SAYS[${row%%|*}]:-${at_once[*]}}"; done
} | column -t -s '|'
exit "$FAILED"
