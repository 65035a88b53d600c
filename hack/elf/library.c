/* Replaces libnvidia-ml and libcuda. Like the real ones, it needs further libraries of the C library. */
#include <math.h>
#include <pthread.h>
#include <dlfcn.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
volatile double two = 2;

static int start(void)
{
    pthread_mutex_lock(&lock);
    int right = pow(two, two) == 4 && dlsym(RTLD_DEFAULT, "pow") != 0;
    pthread_mutex_unlock(&lock);
    return right ? 0 : 1;
}

int nvmlInit_v2(void) { return start(); }
int cuInit(unsigned flags) { return start(); }
