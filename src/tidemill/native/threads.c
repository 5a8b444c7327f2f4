/* Threads that do a job's tasks together with the one that has the job: see threads.h. */

#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

#include "threads.h"

#define SPIN 100000 /* nanoseconds that a thread waits awake */
#define ALONE 10    /* times as long as a helper without a core was waited for jobs are done without */

/* What there is to do: the tasks from `left`'s upper half to before its lower half can be taken,
   `open` ones are not done yet. What lies here is written while both are 0. */
static struct {
    pthread_mutex_t used, lock;
    pthread_cond_t wake;
    int64_t helpers, alone_until;
    Task task;
    const void *job;
    _Alignas(128) atomic_uint_fast64_t left; /* on a line of its own, as is all that others look at all the time */
    _Alignas(128) atomic_int_fast64_t open;
    _Alignas(128) atomic_int_fast64_t asleep;
} pool = {.used = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

#define FIRST_OF(left) ((left) >> 32)
#define END_OF(left) ((left) & 0xffffffffu)

static int64_t now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000000 + at.tv_nsec;
}

static int any_left(void)
{
    uint_fast64_t left = atomic_load(&pool.left);
    return FIRST_OF(left) < END_OF(left);
}

/* Who has the job takes tasks from the end on, helpers from the first on: of two tasks that come
   again and again each stays where its numbers are in the caches. */
static void do_tasks(int helping)
{
    uint_fast64_t left = atomic_load(&pool.left);
    while (FIRST_OF(left) < END_OF(left))
        if (atomic_compare_exchange_weak(&pool.left, &left, helping ? left + ((uint_fast64_t)1 << 32) : left - 1)) {
            pool.task(pool.job, helping ? FIRST_OF(left) : END_OF(left) - 1);
            atomic_fetch_sub(&pool.open, 1);
            left = atomic_load(&pool.left);
        }
}

static void *help(void *unused)
{
    for (int64_t since = now();; since = now()) {
        while (!any_left() && now() - since < SPIN)
            ;
        if (!any_left()) {
            pthread_mutex_lock(&pool.lock);
            atomic_fetch_add(&pool.asleep, 1);
            while (!any_left())
                pthread_cond_wait(&pool.wake, &pool.lock);
            atomic_fetch_sub(&pool.asleep, 1);
            pthread_mutex_unlock(&pool.lock);
        }
        do_tasks(1);
    }
    return unused;
}

/* A process that was forked has the calling thread alone, and what the others held or waited for
   stays so for ever. */
static void begin_in_child(void)
{
    pthread_mutex_init(&pool.used, NULL), pthread_mutex_init(&pool.lock, NULL), pthread_cond_init(&pool.wake, NULL);
    pool.helpers = 0;
    atomic_store(&pool.left, 0), atomic_store(&pool.open, 0), atomic_store(&pool.asleep, 0);
}

/* Have up to so many threads beside the calling one take part from now on; return how many there
   are, which are never fewer than before. */
int64_t EXPORT(helpers)(int64_t count)
{
    static int heeds_forks;
    sigset_t all, before; /* signals are for the threads of the program */
    sigfillset(&all);
    pthread_mutex_lock(&pool.used);
    if (!heeds_forks)
        heeds_forks = !pthread_atfork(NULL, NULL, begin_in_child);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    for (pthread_t made; pool.helpers < count && !pthread_create(&made, NULL, help, NULL); pool.helpers++)
        pthread_detach(made);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_mutex_unlock(&pool.used);
    return pool.helpers;
}

int has_helpers(void) { return pool.helpers > 0; }

void spread(Task task, const void *job, int64_t count, int worth)
{
    if (!pool.helpers || !worth || count < 2 || pthread_mutex_trylock(&pool.used)) {
        while (count-- > 0)
            task(job, count);
        return;
    }
    int64_t begin = now();
    if (begin < pool.alone_until) {
        while (count-- > 0)
            task(job, count);
        pthread_mutex_unlock(&pool.used);
        return;
    }
    pool.task = task, pool.job = job;
    atomic_store(&pool.open, count);
    atomic_store(&pool.left, count);
    if (atomic_load(&pool.asleep)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    do_tasks(0);
    int64_t done = now(), patience = SPIN + done - begin, waited = 0;
    while (atomic_load(&pool.open) > 0)
        if ((waited = now() - done) > patience) /* others have its core for the moment */
            nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    if (waited > patience)
        pool.alone_until = done + waited * ALONE;
    pthread_mutex_unlock(&pool.used);
}
