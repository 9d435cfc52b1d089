/* A small NVML for tests of the monitor. Built with -D options, one library a behaviour. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef DEVICES
#define DEVICES 2
#endif
#ifndef INIT
#define INIT 0
#endif
#ifndef STRIDE
#define STRIDE 24
#endif
#ifndef CONTROL
#define CONTROL "/nonexistent"
#endif

struct handle { int index, gi; };
static struct handle gpus[DEVICES];
static struct handle migs[2] = {{0, 1}, {0, 2}};

static int asked(const char *what) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", CONTROL, what);
    return access(path, F_OK) == 0;
}

int nvmlInit_v2(void) {
    puts("noise on standard output");
    fflush(stdout);
    if (asked("slow_init")) sleep(2);
    for (int i = 0; i < DEVICES; i++) gpus[i] = (struct handle){i, -1};
    return INIT;
}
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) { snprintf(text, length, "555.58.02"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = DEVICES; return asked("uninitialized") ? 1 : 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct handle **device) {
    if (asked("lost") && index == 0) return 15;
    *device = &gpus[index];
    return 0;
}
int nvmlDeviceGetUUID(struct handle *device, char *text, unsigned length) {
    if (device->gi >= 0) snprintf(text, length, "MIG-00000000-0000-0000-0000-00000000000%d", device->gi);
    else snprintf(text, length, "GPU-00000000-0000-0000-0000-00000000000%d", device->index);
    return 0;
}
int nvmlDeviceGetName(struct handle *device, char *text, unsigned length) { snprintf(text, length, "Fake\033 %d", device->index); return 0; }

#ifdef MIG
int nvmlDeviceGetMigMode(struct handle *device, unsigned *current, unsigned *pending) { *current = *pending = device->index == 0; return 0; }
int nvmlDeviceGetMaxMigDeviceCount(struct handle *device, unsigned *count) { *count = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(struct handle *device, unsigned index, struct handle **mig) {
    if (index % 2 || index > 2) return 6;
    *mig = &migs[index / 2];
    return 0;
}
int nvmlDeviceGetGpuInstanceId(struct handle *device, unsigned *id) { *id = device->gi; return 0; }
#endif

#ifndef R470
int nvmlDeviceGetMemoryInfo_v2(struct handle *device, uint64_t *memory) {
    if (asked("memory_not_supported")) return 3;
    if ((uint32_t)memory[0] != 0x02000028) return 25;
    memory[1] = 80ull << 30; memory[2] = 600ull << 20; memory[3] = 0; memory[4] = 1ull << 30;
    if (asked("not_available")) memory[1] = memory[4] = UINT64_MAX;
    return 0;
}
#endif
int nvmlDeviceGetMemoryInfo(struct handle *device, uint64_t *memory) {
    memory[0] = 80ull << 30; memory[1] = 0; memory[2] = 1624ull << 20;
    return 0;
}

struct row { unsigned pid; uint64_t used; unsigned gi, ci; };
static int fill(char *buffer, unsigned *count, unsigned stride, const struct row *rows, unsigned n) {
    unsigned room = *count;
    *count = n;
    if (room < n) return 7;
    for (unsigned i = 0; i < n; i++) {
        memset(buffer + i * stride, 0, stride);
        memcpy(buffer + i * stride, &rows[i], stride < sizeof *rows ? stride : sizeof *rows);
    }
    return 0;
}
static int compute(struct handle *device, unsigned *count, void *buffer, unsigned stride) {
    char what[32];
    snprintf(what, sizeof what, "hang%d", device->index);
    while (asked(what)) usleep(10000);
    if (asked("crash")) abort();
    struct row rows[] = {
        {1000 + device->index, 5ull << 30, device->gi, 0},
        {2000, UINT64_MAX, device->gi, 0},
    };
    return fill(buffer, count, stride, rows, 2);
}
int nvmlDeviceGetComputeRunningProcesses(struct handle *d, unsigned *n, void *b) { return compute(d, n, b, 16); }
int nvmlDeviceGetComputeRunningProcesses_v2(struct handle *d, unsigned *n, void *b) { return compute(d, n, b, 24); }
#ifndef R470
int nvmlDeviceGetComputeRunningProcesses_v3(struct handle *d, unsigned *n, void *b) { return compute(d, n, b, STRIDE); }
#endif
int nvmlDeviceGetGraphicsRunningProcesses_v2(struct handle *device, unsigned *count, void *buffer) { return 3; }
int nvmlDeviceGetMPSComputeRunningProcesses_v2(struct handle *device, unsigned *count, void *buffer) {
    struct row rows[] = {{2000, 7ull << 30, device->gi, 0}};
    return fill(buffer, count, 24, rows, 1);
}
