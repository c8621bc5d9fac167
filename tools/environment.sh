#!/usr/bin/env bash
# Make a virtual environment and install this project into it, editable:
#
#     tools/environment.sh FOLDER REQUIREMENT        (REQUIREMENT: "." or ".[dev]")
#
# Interpreter: $PYTHON if set, else python3 if it is new enough, else the newest python3.x on the path that really
# runs (a pyenv shim may exist and fail). Tool: uv if present, else the venv module, else, where Debian left out
# ensurepip, the interpreter's own pip. If nothing works: one line that says which package to install.
set -euo pipefail

folder=$1
requirement=$2
oldest=11 # of 3.x; pyproject.toml says the same

say() { echo "environment: $*" >&2; }
fail() {
    say "$*"
    exit 1
}

# Whether "$1" runs and is Python >= 3.$oldest.
is_usable() { "$1" -c "import sys; sys.exit(sys.version_info < (3, $oldest))" >/dev/null 2>&1; }

find_python() {
    local candidate minor
    if [[ -n ${PYTHON:-} ]]; then
        is_usable "$PYTHON" || fail "PYTHON=$PYTHON does not run, or is older than 3.$oldest"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 $(for ((minor = 30; minor >= oldest; minor--)); do echo "python3.$minor"; done); do
        if is_usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

has_uv() { uv --version >/dev/null 2>&1; }

if ! python=$(find_python); then
    [[ -z ${PYTHON:-} ]] || exit 1
    has_uv || fail "no Python 3.$oldest or newer found: apt-get install python3, or set PYTHON=/path/to/python"
    python="3.$oldest" # uv brings it
fi

# What an activated environment or a user's settings would change.
unset VIRTUAL_ENV PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX PIP_USER
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

rm -f "$folder"/.installed-*
if [[ -d $folder ]] && ! "$folder/bin/python" -c "import sys; sys.exit(sys.version_info < (3, $oldest))" 2>/dev/null; then
    [[ -f $folder/pyvenv.cfg || -z $(ls -A "$folder") ]] || fail "$folder exists and is no virtual environment"
    rm -rf "$folder" # its interpreter is gone
fi

with_uv() {
    [[ -x $folder/bin/python ]] || uv venv --quiet --python "$python" "$folder" || return
    # Behind a proxy that signs for itself only the system's certificates do; elsewhere uv's own may be the only ones.
    uv pip install --quiet --python "$folder/bin/python" --editable "$requirement" ||
        UV_SYSTEM_CERTS=1 UV_NATIVE_TLS=1 \
            uv pip install --quiet --python "$folder/bin/python" --editable "$requirement"
}

if has_uv; then
    say "installing into $folder with uv"
    if with_uv; then exit; fi
    say "uv failed; trying without it"
    rm -rf "$folder"
fi

say "installing into $folder with pip"
if [[ ! -x $folder/bin/python ]] && ! "$python" -m venv "$folder" >/dev/null 2>&1; then
    rm -rf "$folder"
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    # Debian keeps ensurepip in a package of its own; a pip that the interpreter has can fill the environment as well.
    if ! "$python" -m pip --version >/dev/null 2>&1 || ! "$python" -m venv --without-pip "$folder" >/dev/null 2>&1; then
        rm -rf "$folder"
        fail "this Python cannot make environments: apt-get install python$version-venv (or install uv)"
    fi
fi
if "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
    "$folder/bin/python" -m pip install --quiet --editable "$requirement"
else
    "$python" -m pip --python "$folder/bin/python" install --quiet --editable "$requirement" ||
        fail "pip is too old to fill $folder: apt-get install python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv (or install uv)"
fi
