/* For a process under libfaketime 0.9.10, which moves the clock that librdkafka asks, and not the C11 wait by that clock:
   with a clock two days ahead librdkafka would wait for two days, with one behind it would not wait at all. libfaketime
   does see the wait of POSIX, which glibc's C11 wait is. */
#include <errno.h>
#include <pthread.h>
#include <threads.h>

int cnd_timedwait(cnd_t *restrict condition, mtx_t *restrict mutex, const struct timespec *restrict until)
{
    int failed = pthread_cond_timedwait((pthread_cond_t *)condition, (pthread_mutex_t *)mutex, until);
    return !failed ? thrd_success : failed == ETIMEDOUT ? thrd_timedout : thrd_error;
}
