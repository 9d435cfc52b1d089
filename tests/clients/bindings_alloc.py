"""Allocates and frees known sizes through cuda-bindings and prints what it did, one JSON object a line.

cuda-bindings finds every driver function through cuGetProcAddress_v2, as the CUDA runtime does.
"""

import argparse
import json
import os
import time
import uuid

from cuda.bindings import driver

DEVICE_BYTES = (4096, 3 << 20, 32 << 20)
ASYNC_BYTES = 6 << 20
TOO_LARGE_BYTES = 1 << 44


def emit(event, **fields):
    print(json.dumps({"event": event, "pid": os.getpid(), **fields}), flush=True)


def call(name, *arguments):
    """Calls a driver function that has to succeed and gives its results."""
    code, *results = getattr(driver, name)(*arguments)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise SystemExit(f"{name}{arguments} returned {code!r}")
    return results[0] if len(results) == 1 else results


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=int, default=0, help="device ordinal")
    parser.add_argument("--hold", type=float, default=0.0, help="seconds to hold everything before it is freed")
    parser.add_argument("--linger", type=float, default=0.0, help="seconds to stay after everything is freed")
    arguments = parser.parse_args()

    emit("start", client="cuda-bindings")
    call("cuInit", 0)
    device = call("cuDeviceGet", arguments.device)
    identity = uuid.UUID(bytes=bytes(call("cuDeviceGetUuid", device).bytes))
    emit("device", device=arguments.device, uuid=f"GPU-{identity}")
    context = call("cuDevicePrimaryCtxRetain", device)
    call("cuCtxSetCurrent", context)
    pointers = [call("cuMemAlloc", size) for size in DEVICE_BYTES]
    pooled = call("cuMemAllocAsync", ASYNC_BYTES, 0)
    code, _ = driver.cuMemAlloc(TOO_LARGE_BYTES)
    emit("outcome", case="out-of-memory", code=int(code))
    families = {"device": sum(DEVICE_BYTES), "async": ASYNC_BYTES}
    emit("live", bytes=sum(families.values()), count=len(pointers) + 1, families=families)
    emit("ready")
    time.sleep(arguments.hold)
    for pointer in pointers:
        call("cuMemFree", pointer)
    call("cuMemFreeAsync", pooled, 0)
    call("cuStreamSynchronize", 0)
    emit("live", bytes=0, count=0, families={})
    time.sleep(arguments.linger)
    call("cuDevicePrimaryCtxRelease", device)
    emit("end", allocated=len(pointers) + 1)


if __name__ == "__main__":
    main()
