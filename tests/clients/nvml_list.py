"""Prints what nvitop and gpustat see through NVML, as one JSON object: devices, memory and processes of each."""

import json

import gpustat
import nvitop


def seen_by_nvitop():
    devices = []
    for device in nvitop.Device.all():
        processes = device.processes()
        devices.append(
            {
                "index": device.index,
                "uuid": device.uuid(),
                "name": device.name(),
                "memory_total_bytes": device.memory_total(),
                "memory_used_bytes": device.memory_used(),
                "processes": {str(pid): processes[pid].gpu_memory() for pid in sorted(processes)},
            }
        )
    return devices


def seen_by_gpustat():
    devices = []
    for gpu in gpustat.new_query():
        devices.append(
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "name": gpu.name,
                # gpustat works in MiB.
                "memory_total_mib": gpu.memory_total,
                "memory_used_mib": gpu.memory_used,
                "processes": {str(process["pid"]): process["gpu_memory_usage"] for process in gpu.processes},
            }
        )
    return devices


if __name__ == "__main__":
    print(json.dumps({"nvitop": seen_by_nvitop(), "gpustat": seen_by_gpustat()}))
