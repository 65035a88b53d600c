/* The driver's programs as the linker and the loader see them; which one it is, its name says. Each prints the shared
   objects that it runs with. No function that headers of a newer C library would give another name. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NO_LIBRARY 12

#ifdef NEEDS
extern int NEEDS(void);
#endif

static int show(struct dl_phdr_info *info, size_t size, void *data)
{
    char real[PATH_MAX];
    if (info->dlpi_name[0] == '/' && realpath(info->dlpi_name, real))
        printf("loaded %s\n", real);
    return 0;
}

/* 0 once the library was found and its first function called. */
static int use(const char *library, const char *function)
{
    void *handle = dlopen(library, RTLD_NOW | RTLD_GLOBAL);
    int (*init)(void) = handle ? (int (*)(void))dlsym(handle, function) : NULL;
    if (!init || init() != 0) {
        printf("%s: %s\n", library, dlerror());
        return NO_LIBRARY;
    }
    dl_iterate_phdr(show, NULL);
    fflush(stdout);
    return 0;
}

static int smi(int count, char **words)
{
    if (use("libnvidia-ml.so.1", "nvmlInit_v2") != 0) {
        printf("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.\n");
        return NO_LIBRARY;
    }
    if (count == 6 && !strcmp(words[1], "compute-policy") && !strcmp(words[4], "--set-timeslice"))
        printf("time slice %s on %s\n", words[5], words[3]);
    else if (count == 5 && !strncmp(words[3], "--query-gpu", 11))
        printf("Default\n");
    else if (count != 5 || strcmp(words[3], "-c"))
        return 2;
    return 0;
}

static const char *pid_file(void)
{
    static char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/nvidia-cuda-mps-control.pid", getenv("CUDA_MPS_PIPE_DIRECTORY"));
    return path;
}

/* The daemon starts a server by its bare name, and says by its pid file that it is ready once that runs. */
static int serve(char **words)
{
    int ready[2];
    char byte, number[32];
    if (use("libcuda.so.1", "cuInit") != 0 || pipe(ready) != 0)
        return 1;
    if (fork() == 0) {
        dup2(ready[1], 3);
        execlp("nvidia-cuda-mps-server", "nvidia-cuda-mps-server", NULL);
        _exit(127);
    }
    close(ready[1]);
    if (read(ready[0], &byte, 1) != 1)
        return 1;
    int file = open(pid_file(), O_WRONLY | O_CREAT, 0644);
    int length = snprintf(number, sizeof number, "%d\n", (int)getpid());
    if (write(file, number, length) != length)
        return 1;
    for (;;)
        pause();
}

static int server(void)
{
    if (use("libcuda.so.1", "cuInit") != 0 || write(3, "r", 1) != 1)
        return 1;
    close(3);
    for (;;)
        pause();
}

/* Stands for the conversation over the daemon's socket. */
static int ask(void)
{
    char line[256], number[32] = "";
    while (fgets(line, sizeof line, stdin)) {
        if (!strncmp(line, "get_default", 11))
            printf("100.0\n");
        int file = open(pid_file(), O_RDONLY);
        if (!strncmp(line, "quit", 4) && file >= 0 && read(file, number, sizeof number - 1) > 0)
            kill(atoi(number), SIGTERM);
    }
    return 0;
}

int main(int count, char **words)
{
    const char *slash = strrchr(words[0], '/'), *name = slash ? slash + 1 : words[0];
#ifdef NEEDS
    if (!NEEDS())
        return 3;
#endif
    if (!strcmp(name, "nvidia-smi"))
        return smi(count, words);
    if (!strcmp(name, "nvidia-cuda-mps-server"))
        return server();
    return count > 1 ? serve(words) : ask();
}
