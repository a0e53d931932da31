/* Repeats calls of this package's kernels, one after the other: a step's layers without any Python. */

#include <stdint.h>
#include <string.h>

typedef struct {
    void (*run)(void *);
    char *job;        /* its own; NULL: the step's, after its fields that differ by layer were set */
    int64_t *rows;    /* in its own job: the number of rows */
    int64_t first[4]; /* the first fields of the step's job: three tensors and a stride */
} call_t;

int64_t neaptide_recording_call_bytes(void) { return sizeof(call_t); }

/* Written by another process. */
typedef struct { int64_t sent, taken; } arrivals_t;

/* Makes the calls; returns whether all were made. It stops before one of the first `looking` calls if more has been
   sent than taken. */
int64_t neaptide_replay(
    const call_t *calls, int64_t count, char *step_job, int64_t rows, const volatile arrivals_t *arrivals,
    int64_t looking) {
    for (const call_t *call = calls; call < calls + count; call++) {
        if (call < calls + looking && arrivals->sent > arrivals->taken) return 0;
        if (call->job) *call->rows = rows;
        else memcpy(step_job, call->first, sizeof call->first);
        call->run(call->job ? call->job : step_job);
    }
    return 1;
}
