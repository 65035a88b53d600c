/* An NVML library of one GPU, as a shared object: proves the way through ctypes that the simulator does not take. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NOT_SUPPORTED 3
#define GPU ((void *)0x7f0012345678)

int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 4 ? "Insufficient Permissions" : "Not Supported"; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { strcpy(out, "570.10.01"); return 0; }
int nvmlSystemGetCudaDriverVersion(int *out) { *out = 12080; return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = 12080; return 0; }
int nvmlDeviceGetCount_v2(unsigned *out) { *out = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) { *out = GPU; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) { *out = GPU; return 0; }
int nvmlDeviceGetUUID(void *gpu, char *out, unsigned size) {
    if (gpu != GPU) return 2;
    strcpy(out, "GPU-11111111-2222-3333-4444-555555555555");
    return 0;
}
int nvmlDeviceGetIndex(void *gpu, unsigned *out) { *out = 0; return 0; }
int nvmlDeviceGetMinorNumber(void *gpu, unsigned *out) { *out = 0; return 0; }
int nvmlDeviceGetName(void *gpu, char *out, unsigned size) { strcpy(out, "Stub GPU"); return 0; }
int nvmlDeviceGetBrand(void *gpu, unsigned *out) { *out = 14; return 0; }
int nvmlDeviceGetArchitecture(void *gpu, unsigned *out) { *out = 9; return 0; }
int nvmlDeviceGetCudaComputeCapability(void *gpu, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetMemoryInfo(void *gpu, unsigned long long *out) { out[0] = 1ull << 36; out[1] = out[2] = 0; return 0; }
int nvmlDeviceGetPciInfo_v3(void *gpu, char *out) {
    memset(out, 0, 68);
    strcpy(out + 36, "00000000:1B:00.0");
    return 0;
}
int nvmlDeviceGetMigMode(void *gpu, unsigned *current, unsigned *pending) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkState(void *gpu, unsigned link, unsigned *out) { return NOT_SUPPORTED; }
int nvmlDeviceSetMigMode(void *gpu, unsigned mode, unsigned *status) {
    fclose(fopen(getenv("STUB_CHANGED"), "w"));
    return *status = 0;
}
