/* A stand-in libnvidia-ml.so.1: what nvidia-ml-py calls, answered from a plain text file named by RRL_FAKE_NVML.
 *
 * driver.py writes that file anew (write, rename) whenever a scenario changes something; every call looks at it first,
 * so that running processes see the change. Without the file, nvmlInit says that no driver is loaded. One line each:
 *
 *   gpus N                         how many there are (all lines below number them from 0)
 *   driver VERSION                 of the driver
 *   epoch N                        another number than at nvmlInit: the driver was reloaded, every call says so
 *   set GPU FIELD VALUE            FIELD of INTEGERS below; GPU * is all; VALUE "unsupported": NVML_ERROR_NOT_SUPPORTED
 *   text GPU FIELD VALUE           uuid, name, serial, vbios, pci (to the line's end)
 *   link GPU LINK FIELD VALUE      active, replay, recovery, crc_flit, crc_data; LINK * is all
 *   process GPU PID BYTES          a compute process
 *   fail FUNCTION CODE GPU         FUNCTION returns CODE; * is all that take a device; field:ID fails one field value
 *   hang FUNCTION GPU              FUNCTION does not return before this line is gone
 *   xid SEQUENCE GPU CODE          a critical Xid event; sequence numbers rise; GPU -1: the event names no device
 *
 * Built with -DOLD_DRIVER it lacks what came with drivers after r525. Structures are as in NVIDIA's nvml.h.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MAX_GPUS = 64, MAX_LINKS = 18, MAX_RULES = 128, MAX_PROCESSES = 128, MAX_XIDS = 512, TEXT = 96 };
static const int64_t UNSUPPORTED = INT64_MIN;

typedef int nvmlReturn_t;
enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9, TIMEOUT = 10, ARGUMENT_VERSION_MISMATCH = 25,
};

/* name, default: an idle H100 SXM. driver.py reads the names here. */
#define INTEGERS(X)                                                                                                    \
    X(recovery_action, 0)                                                                                              \
    X(mig, 0)                                                                                                          \
    X(ecc_volatile_corrected, 0)                                                                                       \
    X(ecc_volatile_uncorrected, 0)                                                                                     \
    X(ecc_aggregate_corrected, 0)                                                                                      \
    X(ecc_aggregate_uncorrected, 0)                                                                                    \
    X(remapped_corrected, 0)                                                                                           \
    X(remapped_uncorrected, 0)                                                                                         \
    X(remap_pending, 0)                                                                                                \
    X(remap_failed, 0)                                                                                                 \
    X(retired_corrected, UNSUPPORTED)                                                                                  \
    X(retired_uncorrected, UNSUPPORTED)                                                                                \
    X(retired_pending, UNSUPPORTED)                                                                                    \
    X(temperature, 41)                                                                                                 \
    X(temperature_slowdown, 89)                                                                                        \
    X(temperature_shutdown, 95)                                                                                        \
    X(temperature_margin, UNSUPPORTED)                                                                                 \
    X(temperature_slowdown_tlimit, UNSUPPORTED)                                                                        \
    X(temperature_memory, 52)                                                                                          \
    X(temperature_memory_max, 105)                                                                                     \
    X(clock_reasons, 1)                                                                                                \
    X(clock_sm, 1980)                                                                                                  \
    X(clock_sm_max, 1980)                                                                                              \
    X(utilization, 0)                                                                                                  \
    X(memory_used, 4194304)                                                                                            \
    X(memory_reserved, 524288000)                                                                                      \
    X(memory_total, 85520809984)                                                                                       \
    X(pcie_replays, 0)                                                                                                 \
    X(pcie_gen, 5)                                                                                                     \
    X(pcie_gen_max, 5)                                                                                                 \
    X(pcie_width, 16)                                                                                                  \
    X(pcie_width_max, 16)                                                                                              \
    X(nvlinks, 18)                                                                                                     \
    X(nvlink_fields, 1)                                                                                                \
    X(fabric_state, 3)                                                                                                 \
    X(fabric_status, 0)                                                                                                \
    X(xid_events, 1)

#define NAME(name, value) I_##name,
enum { INTEGERS(NAME) COUNT_INTEGERS };
#define STRING(name, value) #name,
static const char *const INTEGER_NAMES[] = {INTEGERS(STRING)};
#define VALUE(name, value) value,

enum { L_active, L_replay, L_recovery, L_crc_flit, L_crc_data, COUNT_LINK };
static const char *const LINK_NAMES[] = {"active", "replay", "recovery", "crc_flit", "crc_data"};
enum { T_uuid, T_name, T_serial, T_vbios, T_pci, COUNT_TEXT };
static const char *const TEXT_NAMES[] = {"uuid", "name", "serial", "vbios", "pci"};

struct rule { char function[64]; int code; int gpu; };
struct process { int gpu; unsigned pid; unsigned long long bytes; };
struct xid { long sequence; int gpu; unsigned long long code; };
struct state {
    int loaded, gpus, epoch, hangs, fails, processes, xids;
    char driver[TEXT];
    int64_t integer[MAX_GPUS][COUNT_INTEGERS];
    int64_t link[MAX_GPUS][MAX_LINKS][COUNT_LINK];
    char text[MAX_GPUS][COUNT_TEXT][TEXT];
    struct rule hang[MAX_RULES], fail[MAX_RULES];
    struct process process[MAX_PROCESSES];
    struct xid xid[MAX_XIDS];
};

typedef struct nvmlDevice_st { int index; } *nvmlDevice_t;
static struct nvmlDevice_st devices[MAX_GPUS];
typedef struct nvmlEventSet_st { long cursor; uint64_t gpus; } *nvmlEventSet_t;

static struct state buffers[2];
static _Atomic(struct state *) current = &buffers[0];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_int initialized, epoch_at_init;

/* ── the state file ─────────────────────────────────────────────────────────────────────────────────────────────── */
static int position(const char *const *names, int count, const char *name, const char *line) {
    for (int i = 0; i < count; i++)
        if (!strcmp(names[i], name)) return i;
    fprintf(stderr, "fake_nvml: no such field in: %s", line);
    abort();
}

static void defaults(struct state *s) {
    static const int64_t values[] = {INTEGERS(VALUE)};
    memset(s, 0, sizeof *s);
    strcpy(s->driver, "570.86.15");
    for (int g = 0; g < MAX_GPUS; g++) {
        devices[g].index = g;
        memcpy(s->integer[g], values, sizeof values);
        for (int l = 0; l < MAX_LINKS; l++) {
            s->link[g][l][L_active] = 1;
            s->link[g][l][L_crc_data] = UNSUPPORTED;
        }
        snprintf(s->text[g][T_uuid], TEXT, "GPU-%08x-0000-4000-8000-%012x", 0xfa4e0000u + (unsigned)g, (unsigned)g);
        strcpy(s->text[g][T_name], "NVIDIA H100 80GB HBM3 (stand-in)");
        snprintf(s->text[g][T_serial], TEXT, "16540230%05d", g);
        strcpy(s->text[g][T_vbios], "96.00.74.00.01");
        snprintf(s->text[g][T_pci], TEXT, "00000000:%02X:00.0", 0x1b + 8 * g);
    }
}

static void parse(struct state *s, const char *line) {
    char what[16], field[64], gpu[16], link[16], value[TEXT];
    int first, last, from, to, used = 0;
    if (sscanf(line, "%15s %n", what, &used) < 1) return;
    const char *rest = line + used;
    if (!strcmp(what, "gpus")) s->gpus = atoi(rest);
    else if (!strcmp(what, "epoch")) s->epoch = atoi(rest);
    else if (!strcmp(what, "driver")) sscanf(rest, "%95s", s->driver);
    else if (!strcmp(what, "fail") && s->fails < MAX_RULES) {
        struct rule *r = &s->fail[s->fails++];
        sscanf(rest, "%63s %d %d", r->function, &r->code, &r->gpu);
    } else if (!strcmp(what, "hang") && s->hangs < MAX_RULES) {
        struct rule *r = &s->hang[s->hangs++];
        sscanf(rest, "%63s %d", r->function, &r->gpu);
    } else if (!strcmp(what, "process") && s->processes < MAX_PROCESSES) {
        struct process *p = &s->process[s->processes++];
        sscanf(rest, "%d %u %llu", &p->gpu, &p->pid, &p->bytes);
    } else if (!strcmp(what, "xid") && s->xids < MAX_XIDS) {
        struct xid *x = &s->xid[s->xids++];
        sscanf(rest, "%ld %d %llu", &x->sequence, &x->gpu, &x->code);
    } else {
        sscanf(rest, "%15s %n", gpu, &used);
        rest += used;
        first = *gpu == '*' ? 0 : atoi(gpu);
        last = *gpu == '*' ? MAX_GPUS - 1 : first;
        if (first < 0 || last >= MAX_GPUS) return;
        from = to = 0;
        if (!strcmp(what, "link")) {
            sscanf(rest, "%15s %n", link, &used);
            rest += used;
            from = *link == '*' ? 0 : atoi(link) % MAX_LINKS;
            to = *link == '*' ? MAX_LINKS - 1 : from;
        }
        if (sscanf(rest, "%63s %95[^\n]", field, value) != 2) return;
        int64_t number = strcmp(value, "unsupported") ? strtoll(value, NULL, 10) : UNSUPPORTED;
        for (int g = first; g <= last; g++) {
            if (!strcmp(what, "set")) s->integer[g][position(INTEGER_NAMES, COUNT_INTEGERS, field, line)] = number;
            if (!strcmp(what, "text")) strcpy(s->text[g][position(TEXT_NAMES, COUNT_TEXT, field, line)], value);
            for (int l = from; !strcmp(what, "link") && l <= to; l++)
                s->link[g][l][position(LINK_NAMES, COUNT_LINK, field, line)] = number;
        }
    }
}

static struct state *refresh(void) {
    static struct stat seen;
    static char seen_path[4096];
    const char *path = getenv("RRL_FAKE_NVML");
    struct stat found;
    memset(&found, 0, sizeof found);
    if (!path || stat(path, &found)) path = "";
    pthread_mutex_lock(&lock);
    if (found.st_ino != seen.st_ino || found.st_mtim.tv_nsec != seen.st_mtim.tv_nsec || found.st_size != seen.st_size ||
        found.st_mtim.tv_sec != seen.st_mtim.tv_sec || strcmp(path, seen_path)) {
        struct state *next = current == &buffers[0] ? &buffers[1] : &buffers[0];
        FILE *file = *path ? fopen(path, "r") : NULL;
        char line[512];
        defaults(next);
        next->loaded = file != NULL;
        while (file && fgets(line, sizeof line, file)) parse(next, line);
        if (file) fclose(file);
        seen = found;
        snprintf(seen_path, sizeof seen_path, "%s", path);
        current = next;
    }
    pthread_mutex_unlock(&lock);
    return current;
}

/* ── every call begins here ─────────────────────────────────────────────────────────────────────────────────────── */
static const struct rule *matching(const struct rule *rules, int count, const char *function, int gpu) {
    for (int i = 0; i < count; i++) {
        int all = !strcmp(rules[i].function, "*") && gpu >= 0;
        if ((all || !strcmp(rules[i].function, function)) && (rules[i].gpu < 0 || rules[i].gpu == gpu)) return &rules[i];
    }
    return NULL;
}

static nvmlReturn_t enter(const char *function, int gpu) {
    struct timespec moment = {0, 5000000};
    struct state *s = refresh();
    while (matching(s->hang, s->hangs, function, gpu)) {
        nanosleep(&moment, NULL);
        s = refresh();
    }
    const struct rule *rule = matching(s->fail, s->fails, function, gpu);
    return rule ? rule->code : SUCCESS;
}

static nvmlReturn_t call(const char *function, int gpu) {
    nvmlReturn_t code = enter(function, gpu);
    if (code) return code;
    return !initialized || epoch_at_init != current->epoch ? UNINITIALIZED : SUCCESS;
}

#define CALL()                                                                                                         \
    do {                                                                                                               \
        nvmlReturn_t code_ = call(__func__, -1);                                                                       \
        if (code_) return code_;                                                                                       \
    } while (0)
#define DEVICE_CALL()                                                                                                  \
    if (device < devices || device >= devices + MAX_GPUS) return INVALID_ARGUMENT;                                     \
    int g = device->index;                                                                                             \
    struct state *s;                                                                                                   \
    do {                                                                                                               \
        nvmlReturn_t code_ = call(__func__, g);                                                                        \
        if (code_) return code_;                                                                                       \
        s = current;                                                                                                   \
    } while (0);                                                                                                       \
    (void)s

static nvmlReturn_t number(int64_t value, unsigned *out) {
    if (value == UNSUPPORTED) return NOT_SUPPORTED;
    *out = (unsigned)value;
    return SUCCESS;
}
static nvmlReturn_t number64(int64_t value, unsigned long long *out) {
    if (value == UNSUPPORTED) return NOT_SUPPORTED;
    *out = (unsigned long long)value;
    return SUCCESS;
}
static nvmlReturn_t words(const char *value, char *out, unsigned length) {
    if (!strcmp(value, "unsupported")) return NOT_SUPPORTED;
    if (strlen(value) >= length) return INSUFFICIENT_SIZE;
    strcpy(out, value);
    return SUCCESS;
}

/* ── library ────────────────────────────────────────────────────────────────────────────────────────────────────── */
nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    nvmlReturn_t code = enter(__func__, -1);
    if (code) return code;
    if (!current->loaded) return DRIVER_NOT_LOADED;
    epoch_at_init = current->epoch;
    initialized++;
    return SUCCESS;
}
nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
nvmlReturn_t nvmlShutdown(void) {
    nvmlReturn_t code = enter(__func__, -1);
    if (code) return code;
    if (!initialized) return UNINITIALIZED;
    initialized--;
    return SUCCESS;
}
const char *nvmlErrorString(nvmlReturn_t result) {
    return result == 19 ? "In use by another client" : result == 28 ? "GPU Not Found" : "Some other error";
}
nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) { CALL(); return words(current->driver, version, length); }
nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length) { CALL(); return words("12.570.86.15", version, length); }
nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length) {
    char path[64];
    CALL();
    snprintf(path, sizeof path, "/proc/%u/comm", pid);
    FILE *file = fopen(path, "r");
    if (!file) return NOT_FOUND;
    if (!fgets(name, (int)length, file)) *name = 0;
    fclose(file);
    name[strcspn(name, "\n")] = 0;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) { CALL(); *count = (unsigned)current->gpus; return SUCCESS; }

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    nvmlReturn_t code = call(__func__, (int)index);
    if (code) return code;
    if ((int)index >= current->gpus) return INVALID_ARGUMENT;
    *device = &devices[index];
    return SUCCESS;
}
static nvmlReturn_t by_text(int which, const char *wanted, nvmlDevice_t *device) {
    for (int g = 0; g < current->gpus; g++)
        if (!strcasecmp(current->text[g][which], wanted)) { *device = &devices[g]; return SUCCESS; }
    return NOT_FOUND;
}
nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) { CALL(); return by_text(T_uuid, uuid, device); }
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *id, nvmlDevice_t *device) { CALL(); return by_text(T_pci, id, device); }

/* ── identity ───────────────────────────────────────────────────────────────────────────────────────────────────── */
#define TEXT_CALL(function, which)                                                                                     \
    nvmlReturn_t function(nvmlDevice_t device, char *out, unsigned length) {                                           \
        DEVICE_CALL();                                                                                                 \
        return words(s->text[g][which], out, length);                                                                  \
    }
TEXT_CALL(nvmlDeviceGetUUID, T_uuid)
TEXT_CALL(nvmlDeviceGetName, T_name)
TEXT_CALL(nvmlDeviceGetSerial, T_serial)
TEXT_CALL(nvmlDeviceGetVbiosVersion, T_vbios)
nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index) { DEVICE_CALL(); *index = (unsigned)g; return SUCCESS; }

typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    DEVICE_CALL();
    memset(pci, 0, sizeof *pci);
    sscanf(s->text[g][T_pci], "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", pci->domain & 0xffff, pci->bus & 0xff, pci->device & 0xff);
    return words(s->text[g][T_pci], pci->busId, sizeof pci->busId);
}

/* ── single values ──────────────────────────────────────────────────────────────────────────────────────────────── */
#define NUMBER_CALL(function, field)                                                                                   \
    nvmlReturn_t function(nvmlDevice_t device, unsigned *out) {                                                        \
        DEVICE_CALL();                                                                                                 \
        return number(s->integer[g][I_##field], out);                                                                  \
    }
NUMBER_CALL(nvmlDeviceGetPcieReplayCounter, pcie_replays)
NUMBER_CALL(nvmlDeviceGetCurrPcieLinkGeneration, pcie_gen)
NUMBER_CALL(nvmlDeviceGetMaxPcieLinkGeneration, pcie_gen_max)
NUMBER_CALL(nvmlDeviceGetCurrPcieLinkWidth, pcie_width)
NUMBER_CALL(nvmlDeviceGetMaxPcieLinkWidth, pcie_width_max)
NUMBER_CALL(nvmlDeviceGetRetiredPagesPendingStatus, retired_pending)

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *mode, unsigned *pending) {
    DEVICE_CALL();
    *pending = 0;
    return number(s->integer[g][I_mig], mode);
}
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned sensor, unsigned *out) {
    DEVICE_CALL();
    return sensor ? INVALID_ARGUMENT : number(s->integer[g][I_temperature], out);
}
nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, unsigned which, unsigned *out) {
    static const int fields[] = {I_temperature_shutdown, I_temperature_slowdown, I_temperature_memory_max};
    DEVICE_CALL();
    return which > 2 ? NOT_SUPPORTED : number(s->integer[g][fields[which]], out);
}
nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned type, unsigned *out) {
    DEVICE_CALL();
    return type != 1 ? NOT_SUPPORTED : number(s->integer[g][I_clock_sm], out);
}
nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned type, unsigned *out) {
    DEVICE_CALL();
    return type != 1 ? NOT_SUPPORTED : number(s->integer[g][I_clock_sm_max], out);
}
nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *out) {
    DEVICE_CALL();
    return number64(s->integer[g][I_clock_reasons], out);
}
nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned type, unsigned counter, unsigned long long *out) {
    static const int fields[2][2] = {{I_ecc_volatile_corrected, I_ecc_aggregate_corrected},
                                     {I_ecc_volatile_uncorrected, I_ecc_aggregate_uncorrected}};
    DEVICE_CALL();
    return type > 1 || counter > 1 ? INVALID_ARGUMENT : number64(s->integer[g][fields[type][counter]], out);
}
nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *cor, unsigned *unc, unsigned *pending, unsigned *failed) {
    DEVICE_CALL();
    nvmlReturn_t code = number(s->integer[g][I_remapped_corrected], cor);
    if (!code) code = number(s->integer[g][I_remapped_uncorrected], unc);
    if (!code) code = number(s->integer[g][I_remap_pending], pending);
    return code ? code : number(s->integer[g][I_remap_failed], failed);
}
nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, unsigned cause, unsigned *count, unsigned long long *pages) {
    DEVICE_CALL();
    int64_t there = s->integer[g][cause ? I_retired_uncorrected : I_retired_corrected];
    if (there == UNSUPPORTED) return NOT_SUPPORTED;
    unsigned room = *count;
    *count = (unsigned)there;
    if (!there) return SUCCESS;
    if (room < there || !pages) return INSUFFICIENT_SIZE;
    for (int i = 0; i < there; i++) pages[i] = 0x1000ull * (unsigned)(i + 1);
    return SUCCESS;
}
typedef struct { unsigned gpu, memory; } nvmlUtilization_t;
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *out) {
    DEVICE_CALL();
    out->memory = 0;
    return number(s->integer[g][I_utilization], &out->gpu);
}
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *out) {
    DEVICE_CALL();
    const int64_t *v = s->integer[g];
    if (v[I_memory_used] == UNSUPPORTED || v[I_memory_total] == UNSUPPORTED) return NOT_SUPPORTED;
    out->total = (unsigned long long)v[I_memory_total];
    out->used = (unsigned long long)(v[I_memory_used] + v[I_memory_reserved]);
    out->free = out->total - out->used;
    return SUCCESS;
}

/* ── field values ───────────────────────────────────────────────────────────────────────────────────────────────── */
typedef struct {
    unsigned fieldId, scopeId;
    long long timestamp, latencyUsec;
    unsigned valueType;
    nvmlReturn_t nvmlReturn;
    union { double d; unsigned ui; unsigned long ul; unsigned long long ull; long long sll; int si; unsigned short us; } value;
} nvmlFieldValue_t;
enum { UNSIGNED_INT = 1, UNSIGNED_LONG_LONG = 3, SIGNED_INT = 5 };

static int64_t field(const struct state *s, int g, unsigned id, unsigned scope, unsigned *type) {
    static const struct { unsigned id, type; int field; } table[] = {
        {3, UNSIGNED_LONG_LONG, I_ecc_volatile_corrected}, {4, UNSIGNED_LONG_LONG, I_ecc_volatile_uncorrected},
        {5, UNSIGNED_LONG_LONG, I_ecc_aggregate_corrected}, {6, UNSIGNED_LONG_LONG, I_ecc_aggregate_uncorrected},
        {29, UNSIGNED_INT, I_retired_corrected}, {30, UNSIGNED_INT, I_retired_uncorrected},
        {31, UNSIGNED_INT, I_retired_pending}, {82, UNSIGNED_INT, I_temperature_memory}, {91, UNSIGNED_INT, I_nvlinks},
        {94, UNSIGNED_INT, I_pcie_replays}, {142, UNSIGNED_INT, I_remapped_corrected},
        {143, UNSIGNED_INT, I_remapped_uncorrected}, {144, UNSIGNED_INT, I_remap_pending},
        {145, UNSIGNED_INT, I_remap_failed},
        {194, SIGNED_INT, I_temperature_slowdown_tlimit},
#ifndef OLD_DRIVER
        {230, UNSIGNED_INT, I_recovery_action},
#endif
    };
    static const struct { unsigned id; int field; } links[] = {
        {161, L_replay}, {162, L_recovery}, {163, L_crc_flit}, {165, L_active}};
    for (unsigned i = 0; i < sizeof table / sizeof *table; i++)
        if (table[i].id == id) { *type = table[i].type; return s->integer[g][table[i].field]; }
    for (unsigned i = 0; i < sizeof links / sizeof *links; i++)
        if (links[i].id == id && s->integer[g][I_nvlink_fields] == 1 && (int64_t)scope < s->integer[g][I_nvlinks]) {
            *type = links[i].id == 165 ? UNSIGNED_INT : UNSIGNED_LONG_LONG;
            return s->link[g][scope][links[i].field];
        }
    return UNSUPPORTED;
}
nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
    DEVICE_CALL();
    for (int i = 0; i < count; i++) {
        char name[24];
        snprintf(name, sizeof name, "field:%u", values[i].fieldId);
        const struct rule *rule = s->fails ? matching(s->fail, s->fails, name, g) : NULL;
        int64_t found = field(s, g, values[i].fieldId, values[i].scopeId, &values[i].valueType);
        values[i].nvmlReturn = rule ? rule->code : found == UNSUPPORTED ? NOT_SUPPORTED : SUCCESS;
        memset(&values[i].value, 0xa5, sizeof values[i].value); /* whoever reads the wrong member shall notice */
        if (values[i].nvmlReturn) continue;
        if (values[i].valueType == UNSIGNED_LONG_LONG) values[i].value.ull = (unsigned long long)found;
        else if (values[i].valueType == SIGNED_INT) values[i].value.si = (int)found;
        else values[i].value.ui = (unsigned)found;
    }
    return SUCCESS;
}

/* ── NVLink, fabric, processes ──────────────────────────────────────────────────────────────────────────────────── */
nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, unsigned *out) {
    DEVICE_CALL();
    if (s->integer[g][I_nvlinks] == UNSUPPORTED) return NOT_SUPPORTED;
    return (int64_t)link >= s->integer[g][I_nvlinks] ? INVALID_ARGUMENT : number(s->link[g][link][L_active], out);
}
nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned link, unsigned counter, unsigned long long *out) {
    DEVICE_CALL();
    if (s->integer[g][I_nvlinks] == UNSUPPORTED) return NOT_SUPPORTED;
    if ((int64_t)link >= s->integer[g][I_nvlinks] || counter > 3) return INVALID_ARGUMENT;
    return number64(s->link[g][link][L_replay + (int)counter], out);
}
typedef struct { unsigned char cluster[16]; nvmlReturn_t status; unsigned clique; unsigned char state; } nvmlGpuFabricInfo_t;
nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *out) {
    DEVICE_CALL();
    if (s->integer[g][I_fabric_state] == UNSUPPORTED) return NOT_SUPPORTED;
    memset(out, 0, sizeof *out);
    out->state = (unsigned char)s->integer[g][I_fabric_state];
    out->status = (nvmlReturn_t)s->integer[g][I_fabric_status];
    return SUCCESS;
}
typedef struct { unsigned pid; unsigned long long usedGpuMemory; unsigned gpuInstanceId, computeInstanceId; } nvmlProcessInfo_t;
static nvmlReturn_t processes(const struct state *s, int g, unsigned *count, nvmlProcessInfo_t *out) {
    unsigned room = *count, found = 0;
    for (int i = 0; i < s->processes; i++) {
        if (s->process[i].gpu != g) continue;
        if (out && found < room) {
            out[found].pid = s->process[i].pid;
            out[found].usedGpuMemory = s->process[i].bytes;
            out[found].gpuInstanceId = out[found].computeInstanceId = ~0u;
        }
        found++;
    }
    *count = found;
    return found > room || (found && !out) ? INSUFFICIENT_SIZE : SUCCESS;
}

/* ── Xid events ─────────────────────────────────────────────────────────────────────────────────────────────────── */
enum { XID_CRITICAL = 8 };
nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
    CALL();
    *set = calloc(1, sizeof **set);
    for (int i = 0; i < current->xids; i++)
        if (current->xid[i].sequence > (*set)->cursor) (*set)->cursor = current->xid[i].sequence;
    return SUCCESS;
}
nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) { CALL(); free(set); return SUCCESS; }
nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) {
    DEVICE_CALL();
    *types = s->integer[g][I_xid_events] == 1 ? XID_CRITICAL : 0;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
    DEVICE_CALL();
    if (!set) return INVALID_ARGUMENT;
    if (types != XID_CRITICAL || s->integer[g][I_xid_events] != 1) return NOT_SUPPORTED;
    set->gpus |= 1ull << g;
    return SUCCESS;
}
typedef struct { nvmlDevice_t device; unsigned long long type, data; unsigned gpuInstanceId, computeInstanceId; } nvmlEventData_t;
nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *out, unsigned timeout_ms) {
    for (unsigned waited = 0;; waited += 5) {
        CALL();
        const struct xid *next = NULL;
        for (int i = 0; set->gpus && i < current->xids; i++) {
            const struct xid *x = &current->xid[i];
            int heard = x->gpu < 0 || (set->gpus >> x->gpu & 1);
            if (heard && x->sequence > set->cursor && (!next || x->sequence < next->sequence)) next = x;
        }
        if (next) {
            set->cursor = next->sequence;
            *out = (nvmlEventData_t){next->gpu < 0 ? NULL : &devices[next->gpu], XID_CRITICAL, next->code, ~0u, ~0u};
            return SUCCESS;
        }
        if (waited >= timeout_ms) return TIMEOUT;
        nanosleep(&(struct timespec){0, timeout_ms - waited < 5 ? (timeout_ms - waited) * 1000000 : 5000000}, NULL);
    }
}

/* ── what came after r525 ───────────────────────────────────────────────────────────────────────────────────────── */
#ifdef OLD_DRIVER
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *out) {
    DEVICE_CALL();
    return processes(s, g, count, out);
}
#else
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *out) {
    DEVICE_CALL();
    return processes(s, g, count, out);
}
nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *out) {
    DEVICE_CALL();
    return number64(s->integer[g][I_clock_reasons], out);
}
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *out) {
    DEVICE_CALL();
    const int64_t *v = s->integer[g];
    if (out->version != (2u << 24 | sizeof *out)) return ARGUMENT_VERSION_MISMATCH;
    if (v[I_memory_used] == UNSUPPORTED || v[I_memory_total] == UNSUPPORTED) return NOT_SUPPORTED;
    out->total = (unsigned long long)v[I_memory_total];
    out->used = (unsigned long long)v[I_memory_used];
    out->reserved = (unsigned long long)v[I_memory_reserved];
    out->free = out->total - out->used - out->reserved;
    return SUCCESS;
}
typedef struct { unsigned version; unsigned sensor; int temperature; } nvmlTemperature_t;
nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *out) {
    DEVICE_CALL();
    return out->sensor ? INVALID_ARGUMENT : number(s->integer[g][I_temperature], (unsigned *)&out->temperature);
}
typedef struct { unsigned version; int margin; } nvmlMarginTemperature_t;
nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t device, nvmlMarginTemperature_t *out) {
    DEVICE_CALL();
    return number(s->integer[g][I_temperature_margin], (unsigned *)&out->margin);
}
typedef struct {
    unsigned version;
    unsigned char cluster[16];
    nvmlReturn_t status;
    unsigned clique;
    unsigned char state;
    unsigned healthMask;
} nvmlGpuFabricInfo_v2_t;
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfo_v2_t *out) {
    DEVICE_CALL();
    if (out->version != (2u << 24 | sizeof *out)) return ARGUMENT_VERSION_MISMATCH;
    if (s->integer[g][I_fabric_state] == UNSUPPORTED) return NOT_SUPPORTED;
    out->state = (unsigned char)s->integer[g][I_fabric_state];
    out->status = (nvmlReturn_t)s->integer[g][I_fabric_status];
    out->clique = out->healthMask = 0;
    memset(out->cluster, 0, sizeof out->cluster);
    return SUCCESS;
}
#endif
