/* Threads of the core, which change no bit of what is computed: a job is cut into tasks that
   threads take as they come, and each number is computed by one task. */

#include "vectors.h"

#define spread JOIN(tidemill_spread, ISA)
#define has_helpers JOIN(tidemill_has_helpers, ISA)

typedef void (*Task)(const void *job, int64_t number);

/* Do the tasks count - 1 … 0 of a job, with the helpers where they are free and worth it. */
void spread(Task task, const void *job, int64_t count, int worth);

/* Whether a job that begins now would have helpers. */
int has_helpers(void);
