/* Preloaded into one process, makes one folder slow and nothing else: opening, renaming or removing a file in the folder
 * PDMESH_CHAOS_DISK takes as many seconds longer as the file says whose name PDMESH_CHAOS_DISK_DELAY holds (a double, mapped, so
 * that it may change at any moment). The thread that asks waits, as it does for a disk.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static volatile double *delay;
static const char *folder;

__attribute__((constructor)) static void map_delay(void) {
    const char *name = getenv("PDMESH_CHAOS_DISK_DELAY");
    folder = getenv("PDMESH_CHAOS_DISK");
    int (*real_open)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open");
    int fd = name && folder ? real_open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *memory = mmap(NULL, sizeof(double), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (memory != MAP_FAILED) delay = memory;
}

static void wait_for(const char *path) {
    double seconds = delay ? *delay : 0.0;
    if (seconds <= 0.0 || !path || strncmp(path, folder, strlen(folder)) != 0) return;
    struct timespec left = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (nanosleep(&left, &left) != 0) {
    }
}

#define OPENING(name)                                                                       \
    int name(const char *path, int flags, ...) {                                            \
        static int (*real)(const char *, int, ...);                                         \
        if (!real) real = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name);         \
        va_list more;                                                                       \
        va_start(more, flags);                                                              \
        mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? (mode_t)va_arg(more, unsigned) : 0; \
        va_end(more);                                                                       \
        wait_for(path);                                                                     \
        return real(path, flags, mode);                                                     \
    }
OPENING(open)
OPENING(open64)

int rename(const char *from, const char *to) {
    static int (*real)(const char *, const char *);
    if (!real) real = (int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename");
    wait_for(from);
    return real(from, to);
}

int unlink(const char *path) {
    static int (*real)(const char *);
    if (!real) real = (int (*)(const char *))dlsym(RTLD_NEXT, "unlink");
    wait_for(path);
    return real(path);
}
