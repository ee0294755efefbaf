/* Preloaded into a process, adds the whole seconds in the file WRONG_CLOCK_FILE to what the process takes for the time of
   day. The file is read once a second. Monotonic clocks stay right, as in a machine whose clock somebody sets.

   C11's cnd_timedwait waits by the time of day, and librdkafka waits so: what it reckons is put right before the wait.
   POSIX waits by that clock are not touched: neither Python nor librdkafka has any. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/time.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>

static int (*right_time)(clockid_t, struct timespec *);
static int (*right_wait)(cnd_t *, mtx_t *, const struct timespec *);
static const char *moved_by;
static atomic_llong looked_at = -1, wrong_by;

__attribute__((constructor)) static void begin(void)
{
    right_time = dlsym(RTLD_NEXT, "clock_gettime");
    right_wait = dlsym(RTLD_NEXT, "cnd_timedwait");
    moved_by = getenv("WRONG_CLOCK_FILE");
    unsetenv("LD_PRELOAD"); /* children have the right clock */
}

static long long wrong_seconds(void)
{
    struct timespec now;
    long long looked = looked_at;
    if (!moved_by || right_time(CLOCK_MONOTONIC, &now) || now.tv_sec == looked
        || !atomic_compare_exchange_strong(&looked_at, &looked, now.tv_sec))
        return wrong_by;
    int kept = errno, file = open(moved_by, O_RDONLY | O_CLOEXEC);
    char text[32];
    ssize_t size = file < 0 ? 0 : read(file, text, sizeof text - 1);
    if (size > 0) {
        text[size] = 0;
        wrong_by = atoll(text);
    }
    if (file >= 0)
        close(file);
    errno = kept;
    return wrong_by;
}

int clock_gettime(clockid_t which, struct timespec *now)
{
    if (!right_time) /* the loader's own calls */
        right_time = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = right_time(which, now);
    if (!failed && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE))
        now->tv_sec += wrong_seconds();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    *now = (struct timeval){fine.tv_sec, fine.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *kept)
{
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    if (kept)
        *kept = fine.tv_sec;
    return fine.tv_sec;
}

int timespec_get(struct timespec *now, int base)
{
    return base != TIME_UTC || clock_gettime(CLOCK_REALTIME, now) ? 0 : base;
}

int cnd_timedwait(cnd_t *restrict condition, mtx_t *restrict mutex, const struct timespec *restrict until)
{
    struct timespec right = {until->tv_sec - wrong_seconds(), until->tv_nsec};
    return right_wait(condition, mutex, &right);
}
