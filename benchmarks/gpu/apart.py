"""A workload in a process that has not used a GPU: python benchmarks/gpu/apart.py W1 full '{"kind": "simulator", ...}'

Prints the row as JSON.  Workers are forked from it, or started by Ray, and share the device.
"""

from __future__ import annotations

import json
import sys

from measures import timed
from works import SCALES

import piebald


def main() -> None:
    """Measure one workload."""
    name, scale, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    work, kinds = SCALES[scale][name], {"simulator": piebald.Simulator, "ray": piebald.Ray}
    runtime = kinds[settings.pop("kind")](**settings)
    print(json.dumps(timed(work, work.data(), runtime)))


if __name__ == "__main__":
    main()
