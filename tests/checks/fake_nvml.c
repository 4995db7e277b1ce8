/* A stand-in for libnvidia-ml.so.1, for the functions that the gpu check calls.
 *
 * $FAKE_NVML_STATE names a file of lines "<gpu|*> <key> <number>", read at every call, so that a test changes the
 * machine by writing a file. A call looks up three keys before its own answer: "hang:<function>" (never returns),
 * "error:<function>" (returns that nvmlReturn_t), "lost" (GPU_IS_LOST). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, GPU_IS_LOST = 15, VERSION_MISMATCH = 25 };
enum { NODE = -1, GPUS_MAX = 16, RECOVERY_ACTION_FIELD = 230 };

typedef struct { int index; } device_t;
static device_t devices[GPUS_MAX];

static long long state(int gpu, const char *wanted, long long otherwise)
{
    const char *path = getenv("FAKE_NVML_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char who[16], key[96];
    long long value, found = otherwise;
    if (!file)
        return otherwise;
    while (fscanf(file, "%15s %95s %lld", who, key, &value) == 3)
        if (!strcmp(key, wanted) && (who[0] == '*' || atoi(who) == gpu))
            found = value;
    fclose(file);
    return found;
}

static int gate(int gpu, const char *function)
{
    char key[128];
    snprintf(key, sizeof key, "hang:%s", function);
    while (state(gpu, key, 0))
        pause();
    if (gpu != NODE && state(gpu, "lost", 0))
        return GPU_IS_LOST;
    snprintf(key, sizeof key, "error:%s", function);
    return (int)state(gpu, key, SUCCESS);
}

#define INDEX(device) (((device_t *)(device))->index)
#define GATE(gpu) do { int refused = gate(gpu, __func__); if (refused) return refused; } while (0)
#define NUMBER(name, type, key, otherwise) \
    int name(void *device, type *value) { GATE(INDEX(device)); *value = (type)state(INDEX(device), key, otherwise); return SUCCESS; }

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    GATE(NODE);
    for (int i = 0; i < GPUS_MAX; i++)
        devices[i].index = i;
    return SUCCESS;
}

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int code)
{
    static char text[32];
    snprintf(text, sizeof text, "fake NVML error %d", code);
    return text;
}

int nvmlSystemGetDriverVersion(char *buffer, unsigned size) { snprintf(buffer, size, "580.65.06"); return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *count) { GATE(NODE); *count = (unsigned)state(NODE, "count", 8); return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    if (index >= GPUS_MAX)
        return INVALID;
    GATE((int)index);
    *device = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetName(void *device, char *buffer, unsigned size)
{
    GATE(INDEX(device));
    snprintf(buffer, size, "NVIDIA H100 (fake)");
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(void *device, int type, int counter, unsigned long long *value)
{
    GATE(INDEX(device));
    *value = type == 1 && counter == 0 ? (unsigned long long)state(INDEX(device), "ecc_uncorrected", 0) : 7;
    return SUCCESS;
}

typedef struct { unsigned version; unsigned long long counters[11]; unsigned threshold_exceeded; } sram_t;

int nvmlDeviceGetSramEccErrorStatus(void *device, sram_t *status)
{
    GATE(INDEX(device));
    if (status->version != (1u << 24 | sizeof *status))
        return VERSION_MISMATCH;
    status->threshold_exceeded = (unsigned)state(INDEX(device), "sram_threshold", 0);
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed)
{
    GATE(INDEX(device));
    *corrected = *uncorrected = 0;
    *pending = (unsigned)state(INDEX(device), "remap_pending", 0);
    *failed = (unsigned)state(INDEX(device), "remap_failed", 0);
    return SUCCESS;
}

NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, unsigned, "retired_pending", 0)

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *value)
{
    (void)sensor;
    GATE(INDEX(device));
    *value = (unsigned)state(INDEX(device), "temperature", 45);
    return SUCCESS;
}

int nvmlDeviceGetTemperatureThreshold(void *device, int which, unsigned *value)
{
    GATE(INDEX(device));
    *value = which == 1 ? 89 : 92; /* 1: slowdown */
    return SUCCESS;
}

typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    unsigned type, result;
    union { double d; unsigned u; unsigned long long ull; } value;
} field_t;

int nvmlDeviceGetFieldValues(void *device, int count, field_t *fields)
{
    GATE(INDEX(device));
    for (int i = 0; i < count; i++) {
        fields[i].result = fields[i].field == RECOVERY_ACTION_FIELD ? SUCCESS : NOT_SUPPORTED;
        fields[i].value.ull = (unsigned long long)state(INDEX(device), "recovery_action", 0);
    }
    return SUCCESS;
}
