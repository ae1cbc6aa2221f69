#!/bin/sh
# The first four minutes on a GPU: bash benchmarks/gpu/first_minutes.sh --out build/first [--device cuda] [--scale full]
# Needs no installation: python3 with torch and the package's dependencies, or .venv if it is there.
set -eu
cd "$(dirname "$0")/../.."
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 exec "$python" benchmarks/gpu/first_minutes.py "$@"
