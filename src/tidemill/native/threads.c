/* Threads that do a job's tasks together with the one that has the job: see threads.h. */

#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

#include "threads.h"

#define SPIN 100000 /* nanoseconds that a thread waits awake */
#define ALONE 1000  /* jobs that are done without helpers once one of them has lost its core */

/* What there is to do: tasks `left` - 1 … 0 can be taken, `open` ones are not done yet. What lies
   here is written while both are 0. */
static struct {
    pthread_mutex_t used, lock;
    pthread_cond_t wake;
    atomic_int_fast64_t left, open, asleep;
    int64_t helpers, alone;
    Task task;
    const void *job;
} pool = {.used = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static int64_t now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000000 + at.tv_nsec;
}

static void do_tasks(void)
{
    int_fast64_t left = atomic_load(&pool.left);
    while (left > 0)
        if (atomic_compare_exchange_weak(&pool.left, &left, left - 1)) {
            pool.task(pool.job, left - 1);
            atomic_fetch_sub(&pool.open, 1);
            left = atomic_load(&pool.left);
        }
}

static void *help(void *unused)
{
    for (int64_t since = now();; since = now()) {
        while (atomic_load(&pool.left) <= 0 && now() - since < SPIN)
            ;
        if (atomic_load(&pool.left) <= 0) {
            pthread_mutex_lock(&pool.lock);
            atomic_fetch_add(&pool.asleep, 1);
            while (atomic_load(&pool.left) <= 0)
                pthread_cond_wait(&pool.wake, &pool.lock);
            atomic_fetch_sub(&pool.asleep, 1);
            pthread_mutex_unlock(&pool.lock);
        }
        do_tasks();
    }
    return unused;
}

/* Have up to so many threads beside the calling one take part from now on; return how many there
   are, which are never fewer than before. */
int64_t EXPORT(helpers)(int64_t count)
{
    sigset_t all, before; /* signals are for the threads of the program */
    sigfillset(&all);
    pthread_mutex_lock(&pool.used);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    for (pthread_t made; pool.helpers < count && !pthread_create(&made, NULL, help, NULL); pool.helpers++)
        pthread_detach(made);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_mutex_unlock(&pool.used);
    return pool.helpers;
}

void spread(Task task, const void *job, int64_t count, int worth)
{
    if (!pool.helpers || !worth || count < 2 || pthread_mutex_trylock(&pool.used)) {
        while (count-- > 0)
            task(job, count);
        return;
    }
    if (pool.alone > 0) {
        pool.alone--;
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
    do_tasks();
    for (int64_t since = now(); atomic_load(&pool.open) > 0;)
        if (now() - since > SPIN) { /* others have its core for the moment */
            pool.alone = ALONE;
            nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
        }
    pthread_mutex_unlock(&pool.used);
}
