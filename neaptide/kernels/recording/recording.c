/* Calls of this package's kernels, one after the other: what a step's layers compute, without a word of Python. */

#include <stdint.h>
#include <string.h>

typedef struct {
    void (*run)(void *);
    char *job;        /* its own; NULL: the step's, after it has been given what differs by layer */
    int64_t *rows;    /* in a job of its own: how many there are */
    int64_t first[4]; /* the first fields of the step's job: three tensors and a stride */
} call_t;

int64_t neaptide_recording_call_bytes(void) { return sizeof(call_t); }

/* Another process writes them. */
typedef struct { int64_t sent, taken; } arrivals_t;

/* Whether all calls were made. They end before one of the first `looking` if more has been sent than taken. */
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
