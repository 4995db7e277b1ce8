/* A stand-in for libnvidia-ml.so.1, for the functions that the gpu check calls.
 *
 * $FAKE_NVML_STATE names a file of lines "<gpu|*> <key> <number>", read at every call, so that a test changes the
 * machine by writing a file. A call looks up three keys before its own answer: "hang:<function>" (never returns),
 * "error:<function>" (returns that nvmlReturn_t), "lost" (GPU_IS_LOST). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, INSUFFICIENT = 7, TIMEOUT = 10, GPU_IS_LOST = 15, VERSION_MISMATCH = 25 };
enum { NODE = -1, GPUS_MAX = 16, MEMORY_TEMP_FIELD = 82, SLOWDOWN_TLIMIT_FIELD = 194, RECOVERY_ACTION_FIELD = 230 };
enum { UNSIGNED_INT = 1, SIGNED_INT = 5 };

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
    static const char *const keys[2][2] = {{"ecc_corrected", "ecc_corrected_life"}, {"ecc_uncorrected", "ecc_uncorrected_life"}};
    *value = (unsigned long long)state(INDEX(device), keys[type == 1][counter == 1], type == 1 ? 0 : 7);
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

int nvmlDeviceGetRetiredPages(void *device, unsigned cause, unsigned *count, unsigned long long *pages)
{
    GATE(INDEX(device));
    unsigned there = (unsigned)state(INDEX(device), cause ? "retired_double" : "retired_single", 0), room = *count;
    *count = there;
    if (there > room || (there && !pages))
        return INSUFFICIENT;
    for (unsigned i = 0; i < there; i++)
        pages[i] = 4096ull * i;
    return SUCCESS;
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *value)
{
    (void)sensor;
    GATE(INDEX(device));
    *value = (unsigned)state(INDEX(device), "temperature", 45);
    return SUCCESS;
}

int nvmlDeviceGetTemperatureThreshold(void *device, int which, unsigned *value)
{
    static const unsigned limits[] = {92, 89, 95, 87}; /* shutdown, slowdown, memory, GPU */
    GATE(INDEX(device));
    if (which > 3 || state(INDEX(device), "no_thresholds", 0))
        return NOT_SUPPORTED;
    *value = limits[which];
    return SUCCESS;
}

typedef struct { unsigned version; int margin; } margin_t;

int nvmlDeviceGetMarginTemperature(void *device, margin_t *margin)
{
    GATE(INDEX(device));
    margin->margin = (int)state(INDEX(device), "margin", 40);
    return SUCCESS;
}

typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    unsigned type, result;
    union { double d; unsigned u; int i; unsigned long long ull; } value;
} field_t;

int nvmlDeviceGetFieldValues(void *device, int count, field_t *fields)
{
    GATE(INDEX(device));
    for (int i = 0; i < count; i++) {
        fields[i].result = SUCCESS;
        fields[i].type = UNSIGNED_INT;
        fields[i].value.ull = 0;
        if (fields[i].field == RECOVERY_ACTION_FIELD)
            fields[i].value.u = (unsigned)state(INDEX(device), "recovery_action", 0);
        else if (fields[i].field == MEMORY_TEMP_FIELD)
            fields[i].value.u = (unsigned)state(INDEX(device), "memory_temperature", 50);
        else if (fields[i].field == SLOWDOWN_TLIMIT_FIELD) {
            fields[i].type = SIGNED_INT;
            fields[i].value.i = -2;
        } else
            fields[i].result = NOT_SUPPORTED;
    }
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *reasons)
{
    GATE(INDEX(device));
    *reasons = (unsigned long long)state(INDEX(device), "clock_reasons", 1); /* idle */
    return SUCCESS;
}

NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, "pcie_width", 16)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, "pcie_width_max", 16)
NUMBER(nvmlDeviceGetPcieReplayCounter, unsigned, "pcie_replays", 3)

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char address[32]; } pci_t;

int nvmlDeviceGetPciInfo_v3(void *device, pci_t *pci)
{
    GATE(INDEX(device));
    memset(pci, 0, sizeof *pci);
    snprintf(pci->address, sizeof pci->address, "00000000:%02X:00.0", 0x1a + INDEX(device));
    return SUCCESS;
}

/* "nvlinks": how many the card has (default 18); "nvlinks_up": how many of them are up (default all). */
int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *up)
{
    GATE(INDEX(device));
    long long has = state(INDEX(device), "nvlinks", 18);
    if (!has)
        return NOT_SUPPORTED;
    if (link >= has)
        return INVALID; /* as the driver does: the card has fewer links than the library knows */
    *up = link < state(INDEX(device), "nvlinks_up", has);
    return SUCCESS;
}

/* All errors are those of link 0. */
int nvmlDeviceGetNvLinkErrorCounter(void *device, unsigned link, unsigned counter, unsigned long long *value)
{
    static const char *const keys[] = {"nvlink_replay", "nvlink_recovery", "nvlink_crc_flit", "nvlink_crc_data", "nvlink_ecc_data"};
    GATE(INDEX(device));
    if (counter > 4)
        return INVALID;
    *value = link ? 0 : (unsigned long long)state(INDEX(device), keys[counter], 4);
    return SUCCESS;
}

typedef struct {
    unsigned version;
    unsigned char cluster[16];
    unsigned status, clique;
    unsigned char state;
    unsigned health;
    unsigned char summary;
} fabric_t;

int nvmlDeviceGetGpuFabricInfoV(void *device, fabric_t *fabric)
{
    GATE(INDEX(device));
    if (fabric->version != (3u << 24 | sizeof *fabric))
        return VERSION_MISMATCH;
    fabric->state = (unsigned char)state(INDEX(device), "fabric_state", 3);
    fabric->status = (unsigned)state(INDEX(device), "fabric_status", 0);
    fabric->health = (unsigned)state(INDEX(device), "fabric_health", 0x51aa); /* every part healthy */
    fabric->summary = (unsigned char)state(INDEX(device), "fabric_summary", 1);
    return SUCCESS;
}

typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process_t;

/* "utilisation": in percent. */
typedef struct { unsigned gpu, memory; } utilisation_t;
typedef struct { unsigned long long total, free, used; } memory_t;

int nvmlDeviceGetUtilizationRates(void *device, utilisation_t *rates)
{
    GATE(INDEX(device));
    rates->gpu = (unsigned)state(INDEX(device), "utilisation", 0);
    rates->memory = 0;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory)
{
    GATE(INDEX(device));
    memory->total = 80ull << 30;
    memory->used = (unsigned long long)state(INDEX(device), "used_mib", 1024) << 20;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

/* "process": a pid, "process_mib": what it holds. */
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process_t *processes)
{
    GATE(INDEX(device));
    long long pid = state(INDEX(device), "process", 0);
    unsigned room = *count;
    *count = pid != 0;
    if (!pid)
        return SUCCESS;
    if (!room || !processes)
        return INSUFFICIENT;
    memset(processes, 0, sizeof *processes);
    processes->pid = (unsigned)pid;
    processes->used = (unsigned long long)state(INDEX(device), "process_mib", 4096) << 20;
    return SUCCESS;
}

/* "xid": the number that the next wait for events tells of this card, once for each event set. */
typedef struct { unsigned watched; } events_t;
typedef struct { void *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } event_t;

int nvmlEventSetCreate(events_t **set) { *set = calloc(1, sizeof **set); return SUCCESS; }
int nvmlEventSetFree(events_t *set) { free(set); return SUCCESS; }

int nvmlDeviceRegisterEvents(void *device, unsigned long long types, events_t *set)
{
    (void)types;
    GATE(INDEX(device));
    set->watched |= 1u << INDEX(device);
    return SUCCESS;
}

int nvmlEventSetWait_v2(events_t *set, event_t *event, unsigned timeout_ms)
{
    (void)timeout_ms;
    for (int i = 0; i < GPUS_MAX; i++)
        if (set->watched & 1u << i && state(i, "xid", 0)) {
            set->watched &= ~(1u << i);
            memset(event, 0, sizeof *event);
            event->device = &devices[i];
            event->type = 8; /* a critical Xid */
            event->data = (unsigned long long)state(i, "xid", 0);
            return SUCCESS;
        }
    return TIMEOUT;
}
