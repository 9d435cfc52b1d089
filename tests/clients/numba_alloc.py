"""Allocates and frees known sizes through numba-cuda and prints what it did, one JSON object a line.

Runs on any libcuda.so.1 that LD_LIBRARY_PATH gives. The sizes are requested bytes, exactly as the driver is asked.
"""

import argparse
import json
import os
import time

from numba import cuda
from numba.cuda import config
import numpy as np

DEVICE_BYTES = (1 << 20, 3 << 20, 64 << 20)
MANAGED_BYTES = 4 << 20
HOST_BYTES = 8 << 20


def emit(event, **fields):
    print(json.dumps({"event": event, "pid": os.getpid(), **fields}), flush=True)


def held(allocations):
    families = {}
    for family, array in allocations:
        families[family] = families.get(family, 0) + array.nbytes
    return {"bytes": sum(families.values()), "count": len(allocations), "families": families}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hold", type=float, default=0.0, help="seconds to hold everything before it is freed")
    parser.add_argument("--linger", type=float, default=0.0, help="seconds to stay after everything is freed")
    parser.add_argument("--churn", type=int, default=10, help="further allocations of 2 MiB, each freed at once")
    arguments = parser.parse_args()

    # numba frees in batches by default. Without the batch a free is a driver call at the moment the array goes.
    config.CUDA_DEALLOCS_COUNT = 0

    emit("start", client="numba-cuda")
    context = cuda.current_context()
    emit("device", device=context.device.id, uuid=context.device.uuid)
    allocations = [("device", cuda.device_array(size, dtype=np.uint8)) for size in DEVICE_BYTES]
    allocations.append(("managed", cuda.managed_array(MANAGED_BYTES, dtype=np.uint8)))
    allocations.append(("host", cuda.pinned_array(HOST_BYTES, dtype=np.uint8)))
    for _ in range(arguments.churn):
        cuda.device_array(2 << 20, dtype=np.uint8)
    context.deallocations.clear()
    emit("live", **held(allocations))
    emit("ready")
    time.sleep(arguments.hold)
    del allocations
    context.deallocations.clear()
    emit("live", bytes=0, count=0, families={})
    time.sleep(arguments.linger)
    emit("end", allocated=len(DEVICE_BYTES) + 2 + arguments.churn)


if __name__ == "__main__":
    main()
