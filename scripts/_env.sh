# Sourced by the scripts beside it, which have set `root`. Leaves `python`, the interpreter of the checkout's own
# environment with ChatServe and the dependency groups named in the arguments of `set_up` installed.
# shellcheck shell=bash

# Another environment's settings must not reach into ours.
unset PYTHONPATH PYTHONHOME PYTHONSTARTUP VIRTUAL_ENV __PYVENV_LAUNCHER__ PIP_TARGET PIP_PREFIX PIP_USER PIP_REQUIRE_VIRTUALENV
export PYTHONNOUSERSITE=1

venv="$root/.venv"
python="$venv/bin/python"

die() {
  printf 'chatserve: %s\n' "$*" >&2
  exit 1
}

# The first line of the stamp; _setup.py computes it the same way.
wanted_stamp() {
  local digest
  if command -v sha256sum >/dev/null; then
    digest=$(sha256sum <"$root/pyproject.toml")
  else
    digest=$(shasum -a 256 <"$root/pyproject.toml")
  fi
  printf '%s %s' "${digest%% *}" "$(cd "$root" && pwd -P)"
}

is_set_up() {
  local first group
  [ -x "$python" ] && [ -r "$venv/chatserve-stamp" ] || return 1
  IFS= read -r first <"$venv/chatserve-stamp" || return 1
  [ "$first" = "$(wanted_stamp)" ] || return 1
  for group; do
    grep -qx -- "$group" "$venv/chatserve-stamp" || return 1
  done
}

find_python() {
  local name
  for name in "${CHATSERVE_PYTHON:-}" python3.12 python3.13 python3.11 python3 python; do
    [ -n "$name" ] && command -v "$name" >/dev/null || continue
    if "$name" -I -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      printf '%s' "$name"
      return
    fi
  done
  return 1
}

set_up() {
  local base
  is_set_up "$@" && return
  base=$(find_python) || die "Python 3.11, 3.12 or 3.13 is needed and was not found; install one (Debian: apt-get install python3 python3-venv) or name it in CHATSERVE_PYTHON"
  "$base" -I "$root/scripts/_setup.py" "$venv" "$@" || exit $?
}
