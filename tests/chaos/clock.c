/* Preloaded into one process, moves its wall clock and nothing else: CLOCK_REALTIME jumps by as many seconds as the file says
 * whose name PDMESH_CHAOS_CLOCK holds (a double, mapped, so that it may change at any moment). The monotonic clock stays, as it
 * does when a machine's clock is set. The kernel knows nothing of it: absolute real-time deadlines of futexes are moved back.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile double *shift;

typedef int (*clock_gettime_fn)(clockid_t, struct timespec *);
typedef long (*syscall_fn)(long, ...);
static clock_gettime_fn real_clock_gettime;
static syscall_fn real_syscall;

__attribute__((constructor)) static void map_shift(void) {
    real_clock_gettime = (clock_gettime_fn)dlsym(RTLD_NEXT, "clock_gettime");
    real_syscall = (syscall_fn)dlsym(RTLD_NEXT, "syscall");
    const char *name = getenv("PDMESH_CHAOS_CLOCK");
    int fd = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *memory = mmap(NULL, sizeof(double), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (memory != MAP_FAILED) shift = memory;
}

static double shift_s(void) { return shift ? *shift : 0.0; }

static void move(struct timespec *at, double by_s) {
    double whole = floor(by_s);
    at->tv_sec += (time_t)whole;
    at->tv_nsec += (long)((by_s - whole) * 1e9);
    if (at->tv_nsec >= 1000000000L) {
        at->tv_sec += 1;
        at->tv_nsec -= 1000000000L;
    }
}

int clock_gettime(clockid_t id, struct timespec *at) {
    if (!real_clock_gettime) real_clock_gettime = (clock_gettime_fn)dlsym(RTLD_NEXT, "clock_gettime");
    int result = real_clock_gettime(id, at);
    if (result == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) move(at, shift_s());
    return result;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    (void)zone;
    struct timespec now;
    int result = clock_gettime(CLOCK_REALTIME, &now);
    if (result == 0) {
        at->tv_sec = now.tv_sec;
        at->tv_usec = now.tv_nsec / 1000;
    }
    return result;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}

long syscall(long number, ...) {
    long a[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    if (!real_syscall) real_syscall = (syscall_fn)dlsym(RTLD_NEXT, "syscall");
    struct timespec until;
    if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) && a[3]) {
        until = *(const struct timespec *)a[3];
        move(&until, -shift_s());
        if (until.tv_sec < 0) until.tv_sec = until.tv_nsec = 0;
        a[3] = (long)&until;
    }
    return real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
