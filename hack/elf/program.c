/* A program of a simulated machine's NVIDIA driver, as a real ELF program. Like NVIDIA's programs, it loads the driver's
   library, and prints their message if that fails. Otherwise it runs the simulator's script: the file with its name in
   ../libexec or, in a container that has only this file, the shell script that is appended to this file.
   It uses no function that the headers of a newer C library rename. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NO_LIBRARY 12
#define CANNOT_RUN 126

static int can_use(const char *library, const char *function)
{
    void *handle = dlopen(library, RTLD_NOW | RTLD_GLOBAL);
    int (*init)(void) = handle ? (int (*)(void))dlsym(handle, function) : NULL;
    return init && init() == 0;
}

/* Returns the script that is appended to the file, after the section headers, which the linker puts last. */
static char *text_behind_the_end(void)
{
    Elf64_Ehdr header;
    int file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    if (file < 0 || read(file, &header, sizeof header) != sizeof header)
        return NULL;
    off_t start = header.e_shoff + (off_t)header.e_shnum * header.e_shentsize;
    off_t size = lseek(file, 0, SEEK_END) - start;
    char *text = size > 0 ? malloc(size + 1) : NULL;
    if (!text || pread(file, text, size, start) != size)
        return NULL;
    text[size] = 0;
    return text;
}

int main(int count, char **words)
{
    char path[PATH_MAX] = "", script[PATH_MAX + 16];
    if (readlink("/proc/self/exe", path, sizeof path - 1) < 0)
        return CANNOT_RUN;
    char *name = strrchr(path, '/') + 1;
    if (!strcmp(name, "nvidia-smi")) {
        if (!can_use("libnvidia-ml.so.1", "nvmlInit_v2")) {
            printf("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. "
                   "Please make sure that the NVIDIA Display Driver is properly installed and present in your system.\n"
                   "Please also try adding directory that contains libnvidia-ml.so to your system PATH.\n");
            return NO_LIBRARY;
        }
    } else if (!can_use("libcuda.so.1", "cuInit")) {
        printf("%s: %s\n", name, dlerror());
        return 1;
    }
    snprintf(script, sizeof script, "%.*s../libexec/%s", (int)(name - path), path, name);
    if (access(script, X_OK) == 0) {
        words[0] = script;
        execv(script, words);
    }
    char *text = text_behind_the_end(), **arguments = calloc(count + 4, sizeof *arguments);
    if (!text || !arguments)
        return CANNOT_RUN;
    arguments[0] = "sh"; /* some shells choose their behaviour by this name */
    arguments[3] = path;
    arguments[1] = "-c";
    arguments[2] = text;
    memcpy(arguments + 4, words + 1, (count - 1) * sizeof *arguments);
    execv("/bin/sh", arguments);
    return CANNOT_RUN;
}
