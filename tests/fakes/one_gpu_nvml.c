/* An NVML with one GPU, for NVIDIA's own nvidia-smi: as much of it as setting and reading the compute mode takes, and
   as setting a time slice takes until the driver's inside is asked. What a call answers is a macro, 0 being success. */
#include <stdio.h>
#include <string.h>

#ifndef INIT
#define INIT 0
#endif
#ifndef FIND
#define FIND 0
#endif
#ifndef GET_MODE
#define GET_MODE 0
#endif
#ifndef SET_MODE
#define SET_MODE 0
#endif
#define NOT_FOUND 6

/* Of the form of nvmlPciInfo_t. */
struct pci {
    char short_id[16];
    unsigned domain, bus, device, ids, subsystem;
    char id[32];
};

static int gpu;

/* The mode stays in a file, since each call is another process. */
static int kept_mode(const char *how, int mode)
{
    FILE *file = fopen(STATE, how);
    if (file && *how == 'r')
        fscanf(file, "%d", &mode);
    else if (file)
        fprintf(file, "%d", mode);
    if (file)
        fclose(file);
    return mode;
}

int nvmlInitWithFlags(unsigned flags) { return INIT; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { return *count = 1, 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { return *device = &gpu, index ? NOT_FOUND : FIND; }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned size) { return strncpy(uuid, UUID, size), 0; }
int nvmlDeviceGetName(void *device, char *name, unsigned size) { return strncpy(name, "NVIDIA T4", size), 0; }
int nvmlDeviceGetIndex(void *device, unsigned *index) { return *index = 0; }
int nvmlDeviceGetComputeMode(void *device, int *mode) { return *mode = kept_mode("r", 0), GET_MODE; }
int nvmlDeviceSetComputeMode(void *device, int mode) { return SET_MODE ? SET_MODE : (kept_mode("w", mode), 0); }

int nvmlDeviceGetPciInfo_v3(void *device, struct pci *pci)
{
    memset(pci, 0, sizeof *pci);
    pci->bus = 1;
    strcpy(pci->short_id, "0000:01:00.0");
    strcpy(pci->id, "00000000:01:00.0");
    return 0;
}

#ifndef OF_ANOTHER_VERSION
/* Tables of functions that are not public: each begins with its size. The one that sets a time slice does nothing here,
   which nvidia-smi takes for an uninitialised NVML. */
static long inside(void) { return 0; }

int nvmlInternalGetExportTable(const void **found, const void *which)
{
    static const void *table[128] = {(void *)sizeof table};
    for (unsigned entry = 1; entry < sizeof table / sizeof *table; entry++)
        table[entry] = (void *)inside;
    return *found = table, 0;
}
#endif
