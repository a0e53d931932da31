/* Attention of a step's tokens over a paged KV cache, by a work list. The README in this directory has the maths.

   An item is a set of query tokens with a run of keys. A tile of keys is read once for all tokens of the item and all
   query heads of its KV head. Scores of a tile stay in the first-level cache. Everything is computed in fp32, whatever
   the cache holds.

   Nothing outside an item's run of slots is read: other slots may hold anything, even NaN. */

#include <stdint.h>
#include <string.h>

#include "pairs.h"

#define MAX_DIM 512
#define MAX_ROWS 64
#define KEYS_BESIDE 8 /* scored while as many keys of the next tile are prefetched: more would stall the core */
#define NO_SCORE (-1e30f) /* finite, so that differences from it are numbers */

typedef struct {
    const char *query; /* [tokens, heads, dim], with query_stride elements between tokens */
    const char *cache; /* [slots, 2 * kv_heads, dim], keys first */
    char *out;         /* [tokens, heads, dim] */
    int64_t query_stride;
    int64_t kv_heads, group, dim, is_bfloat16;
    int64_t few_rows; /* fewer rows are scored one by one, more together in vectors */
    int64_t block_size;
    const int64_t *entries;    /* of all requests' block tables, block * 2 + is_reversed */
    const int64_t *items;      /* [items, 5]: first row, last row, begin of its table, first key, last key */
    const int32_t *row_tokens; /* [rows] */
    const int32_t *row_limits; /* [rows] keys that the row may see, counted from key 0 of its request */
    const int32_t *row_parts;  /* [rows] index of the row's part; -1: it has only one, written to out */
    const int64_t *units;      /* [units, 3]: item, first KV head, last KV head */
    const int64_t *merges;     /* [merges, 3]: token, first part, last part */
    float *parts;              /* [parts, heads, dim + 2]: weighted values, sum of weights, largest score */
    int64_t num_units, num_merges;
    float *scratch; /* [threads, scratch_floats] */
    int64_t scratch_floats, num_threads;
    void *parallel; /* GOMP_parallel of the process, or NULL */
    int64_t next_unit, next_merge, arrived;
} job_t;

/* State of the softmax of wide scores, each [padded]. */
typedef struct {
    float *sums, *largest, *factors;
    int32_t limits[MAX_ROWS];
    int32_t least_limit;
} wide_t;

/* As `weigh`, for all rows at once. Every row sees the first key of its item, so every row has a largest score. */
static void weigh_wide(wide_t *wide, int start, int num_keys, int rows, int padded, int dim, float *scores,
                       float *values) {
    int changed = 0;
    if (start + num_keys > wide->least_limit)
        for (int t = 0; t < num_keys; t++)
            for (int r = 0; r < padded; r++)
                if (start + t >= wide->limits[r]) scores[t * padded + r] = NO_SCORE;
    for (int r = 0; r < padded; r += LANES) {
        vec before = load(wide->largest + r), largest = before, sum = load(wide->sums + r);
        for (int t = 0; t < num_keys; t++) {
            vec value = load(scores + t * padded + r);
            largest = larger(value, largest);
        }
        vec factor = exp2_(before - largest);
        sum *= factor;
        for (int t = 0; t < num_keys; t++) {
            vec weight = exp2_(load(scores + t * padded + r) - largest);
            store(scores + t * padded + r, weight);
            sum += weight;
        }
        store(wide->sums + r, sum);
        store(wide->largest + r, largest);
        store(wide->factors + r, factor);
        for (int i = r; i < r + LANES; i++) changed |= wide->factors[i] != 1.0f;
    }
    if (changed)
        for (int r = 0; r < rows; r++) {
            float factor = wide->factors[r];
            if (factor == 1.0f) continue; /* most rows get a larger score in few tiles only */
            for (int d = 0; d < dim; d++) values[r * dim + d] *= factor;
        }
}

/* Turns scores into weights relative to the largest score so far; updates the sums of weights and values. */
static void weigh(int live, int dim, float *scores, float *values, float *sum, float *largest) {
    if (!live) {
        memset(scores, 0, sizeof(float) * TILE);
        return;
    }
    for (int t = live; t < TILE; t++) scores[t] = NO_SCORE;
    vec most = all(*largest), weights = all(0.0f);
    for (int t = 0; t < TILE; t += LANES) {
        vec some = load(scores + t);
        most = larger(some, most);
    }
    float highest = greatest(most);
    if (highest > *largest) {
        float factor = exp2_of(*largest - highest);
        for (int d = 0; d < dim; d++) values[d] *= factor;
        *sum *= factor;
        *largest = highest;
    }
    for (int t = 0; t < TILE; t += LANES) {
        vec weight = exp2_(load(scores + t) - highest);
        store(scores + t, weight);
        weights += weight;
    }
    *sum += total(weights);
}

static void write_out(const job_t *job, int64_t token, int64_t head, const float *values, float factor) {
    int64_t dim = job->dim, at = (token * job->kv_heads * job->group + head) * dim;
    if (job->is_bfloat16)
        for (int64_t d = 0; d < dim; d++) ((uint16_t *)job->out)[at + d] = to_bfloat16(values[d] * factor);
    else
        for (int64_t d = 0; d < dim; d++) ((float *)job->out)[at + d] = values[d] * factor;
}

/* Working memory of a thread, in its scratch except for the arrays of pointers. */
typedef struct {
    float *copies; /* [2, TILE, dim]: keys and values of a bf16 cache, for many rows */
    float *room;   /* for what depends on the unit */
    const void *keys_at[TILE], *values_at[TILE];
} bench_t;

/* Finds the slots of a tile of keys from `first`, all before `last`; returns how many. A reversed block stores its
   tokens from its last slot backwards. */
static int find_slots(const job_t *job, int64_t table, int64_t first, int64_t last, int64_t *slots) {
    int64_t size = job->block_size, count = least(last - first, TILE), offset = first % size;
    const int64_t *entry = job->entries + table + first / size;
    for (int64_t t = 0; t < count; entry++, offset = 0) {
        int64_t step = 1 - 2 * (*entry & 1), end = least(count, t + size - offset);
        int64_t slot = (*entry >> 1) * size + (step > 0 ? offset : size - 1 - offset);
        for (; t < end; t++, slot += step) slots[t] = slot;
    }
    return (int)count;
}

static void swap(int64_t **one, int64_t **other) {
    int64_t *kept = *one;
    *one = *other;
    *other = kept;
}

/* Finds the addresses of a tile's keys and values in the cache. */
static void find_tile(const job_t *job, const int64_t *slots, int num_keys, int64_t head, bench_t *bench) {
    int64_t bytes = job->dim * (job->is_bfloat16 ? 2 : 4), heads = 2 * job->kv_heads;
    for (int t = 0; t < num_keys; t++) {
        bench->keys_at[t] = job->cache + (slots[t] * heads + head) * bytes;
        bench->values_at[t] = job->cache + (slots[t] * heads + head + job->kv_heads) * bytes;
    }
}

/* Copies a tile to fp32. */
static void widen_tile(int num_keys, int64_t dim, bench_t *bench) {
    for (int t = 0; t < num_keys; t++) {
        float *key_copy = bench->copies + t * dim, *value_copy = key_copy + TILE * dim;
        for (int64_t d = 0; d < dim; d++) key_copy[d] = get(bench->keys_at[t], d, 1);
        for (int64_t d = 0; d < dim; d++) value_copy[d] = get(bench->values_at[t], d, 1);
        bench->keys_at[t] = key_copy;
        bench->values_at[t] = value_copy;
    }
}

/* Reads a query: multiplied by scale in fp32, or unchanged if pairs are multiplied. */
static void read_query(const job_t *job, int64_t token, int64_t head, float scale, float *to) {
    int64_t dim = job->dim, at = token * job->query_stride + head * dim;
    if (takes_pairs(job->is_bfloat16, dim))
        memcpy(to, (const uint16_t *)job->query + at, 2 * dim);
    else if (job->is_bfloat16)
        for (int64_t d = 0; d < dim; d++) to[d] = scale * as_float((uint32_t)((const uint16_t *)job->query)[at + d] << 16);
    else
        for (int64_t d = 0; d < dim; d++) to[d] = scale * ((const float *)job->query)[at + d];
}

/* Finds the part of the next tile, in the order of memory, that is prefetched with head `head`. */
static void find_ahead(const job_t *job, const int64_t *slots, int64_t num_keys, int64_t head, ahead_t *ahead) {
    int64_t heads = job->kv_heads, key = head * TILE / heads, piece = head * TILE % heads;
    ahead->bytes = 2 * job->dim * (job->is_bfloat16 ? 2 : 4);
    for (int64_t t = 0; t < TILE; t++) { /* incremented, because a division takes as long as a score */
        ahead->pieces[t] = job->cache + (key < num_keys ? (slots[key] * heads + piece) * ahead->bytes : 0);
        if (++piece == heads) piece = 0, key++;
    }
}

/* Prefetches some keys and values of the next tile for one head. */
static void call_for(const job_t *job, const int64_t *slots, int64_t num_keys, int64_t head) {
    int64_t bytes = job->dim * (job->is_bfloat16 ? 2 : 4), heads = job->kv_heads;
    for (int64_t t = 0; t < num_keys; t++)
        for (int64_t at = 0; at < bytes; at += LINE) {
            const char *key = job->cache + (slots[t] * 2 * heads + head) * bytes + at;
            PREFETCH(key);
            PREFETCH(key + heads * bytes);
        }
}

/* Writes a row's result of one head to out or to its part. */
static void write_row(const job_t *job, int64_t row, int64_t head, const float *values, float sum, float largest) {
    int64_t dim = job->dim;
    if (job->row_parts[row] < 0) {
        write_out(job, job->row_tokens[row], head, values, 1.0f / sum);
        return;
    }
    float *part = job->parts + (job->row_parts[row] * job->kv_heads * job->group + head) * (dim + 2);
    memcpy(part, values, sizeof(float) * dim);
    part[dim] = sum;
    part[dim + 1] = largest;
}

static int live_keys(const job_t *job, int64_t row, int64_t start, int num_keys) {
    int64_t live = job->row_limits[row] - start;
    return live < 0 ? 0 : live < num_keys ? (int)live : num_keys;
}

/* Computes an item of few rows for some of its KV heads: all of them while a tile of keys is in the cache. */
static void run_few(const job_t *job, const int64_t *item, const int64_t *following, int64_t first_head, int64_t heads,
                    float scale, bench_t *bench) {
    int64_t dim = job->dim, group = job->group, first_row = item[0], rows = (item[1] - item[0]) * group;
    float *scores = bench->room, *query = scores + rows * TILE, *all_values = query + heads * rows * dim;
    float *sums = all_values + heads * rows * dim, *largest = sums + heads * rows;
    int pairs = takes_pairs(job->is_bfloat16, dim);
    memset(all_values, 0, sizeof(float) * heads * rows * dim);
    for (int64_t i = 0; i < heads * rows; i++) {
        int64_t head = first_head + i / rows, row = i % rows;
        read_query(job, job->row_tokens[first_row + row / group], head * group + row % group, scale, query + i * dim);
        sums[i] = 0.0f;
        largest[i] = NO_SCORE;
    }
    int64_t of_tiles[2][TILE], *slots = of_tiles[0], *next = of_tiles[1];
    int num_keys = find_slots(job, item[2], item[3], item[4], slots), num_next;
    for (int64_t start = item[3]; start < item[4]; start += TILE, swap(&slots, &next), num_keys = num_next) {
        if (start + num_keys < item[4]) num_next = find_slots(job, item[2], start + num_keys, item[4], next);
        else num_next = find_slots(job, following[2], following[3], following[4], next);
        for (int64_t h = 0; h < heads; h++) {
            float *values = all_values + h * rows * dim;
            ahead_t ahead;
            if (heads == job->kv_heads) find_ahead(job, next, num_next, h, &ahead);
            find_tile(job, slots, num_keys, first_head + h, bench);
            score_few(pairs, (int)rows, num_keys, (int)dim, query + h * rows * dim, bench->keys_at,
                      (int)job->is_bfloat16, heads == job->kv_heads ? &ahead : NULL, scale, scores);
            int least_live = num_keys;
            for (int64_t row = 0; row < rows; row++) {
                int live = live_keys(job, first_row + row / group, start, num_keys);
                if (live < least_live) least_live = live;
                weigh(live, (int)dim, scores + row * TILE, values + row * dim, sums + h * rows + row,
                      largest + h * rows + row);
            }
            /* Keys that a token does not see are left out and not weighed with 0, so that it gets the bits that it
               would get alone. */
            int64_t count = least_live == num_keys ? rows : group;
            for (int64_t row = 0; row < rows; row += count)
                weigh_values(pairs, (int)count, 0, (int)dim,
                             live_keys(job, first_row + (row + count - 1) / group, start, num_keys),
                             scores + row * TILE, bench->values_at, (int)job->is_bfloat16, values + row * dim);
        }
    }
    for (int64_t i = 0; i < heads * rows; i++)
        write_row(job, first_row + i % rows / group, (first_head + i / rows) * group + i % rows % group,
                  all_values + i * dim, sums[i], largest[i]);
}

/* Computes an item of many rows, for one KV head. */
static void run_wide(const job_t *job, const int64_t *item, int64_t kv_head, float scale, bench_t *bench) {
    int dim = (int)job->dim, group = (int)job->group, rows = (int)(item[1] - item[0]) * group;
    int padded = (rows + LANES - 1) / LANES * LANES, pairs = takes_pairs(job->is_bfloat16, dim);
    int at_once = pairs ? TILE : KEYS_BESIDE;
    float *scores = bench->room, *query = scores + TILE * padded, *values = query + dim * padded, one[MAX_DIM];
    wide_t wide = {.sums = values + rows * dim, .least_limit = INT32_MAX};
    wide.largest = wide.sums + padded;
    wide.factors = wide.largest + padded;
    memset(query, 0, sizeof(float) * dim * padded);
    memset(values, 0, sizeof(float) * rows * dim);
    for (int r = 0; r < padded; r++) {
        wide.sums[r] = 0.0f;
        wide.largest[r] = NO_SCORE;
        wide.limits[r] = INT32_MAX;
        if (r >= rows) continue;
        int64_t row = item[0] + r / group;
        read_query(job, job->row_tokens[row], kv_head * group + r % group, scale, one);
        for (int d = 0; d < (pairs ? dim / 2 : dim); d++) query[d * padded + r] = one[d];
        wide.limits[r] = job->row_limits[row];
        if (wide.limits[r] < wide.least_limit) wide.least_limit = wide.limits[r];
    }
    int64_t of_tiles[2][TILE], *slots = of_tiles[0], *next = of_tiles[1];
    int num_keys = find_slots(job, item[2], item[3], item[4], slots), num_next;
    for (int64_t start = item[3]; start < item[4]; start += TILE, swap(&slots, &next), num_keys = num_next) {
        num_next = find_slots(job, item[2], start + num_keys, item[4], next);
        find_tile(job, slots, num_keys, kv_head, bench);
        if (job->is_bfloat16 && !pairs) widen_tile(num_keys, dim, bench);
        for (int t = 0; t < num_keys; t += at_once) {
            int64_t count = least(num_keys - t, at_once);
            call_for(job, next + t, least(num_next - t, at_once), kv_head);
            score_many(pairs, (int)count, dim, bench->keys_at + t, query, padded, scale, scores + t * padded);
        }
        weigh_wide(&wide, (int)start, num_keys, rows, padded, dim, scores, values);
        weigh_values(pairs, rows, padded, dim, num_keys, scores, bench->values_at, 0, values);
    }
    for (int r = 0; r < rows; r++)
        write_row(job, item[0] + r / group, kv_head * group + r % group, values + r * dim, wide.sums[r],
                  wide.largest[r]);
}

/* `next`: the unit that is probably this thread's next one. */
static void run_unit(const job_t *job, const int64_t *unit, const int64_t *next, float scale, bench_t *bench) {
    const int64_t *item = job->items + 5 * unit[0];
    if ((item[1] - item[0]) * job->group < job->few_rows)
        run_few(job, item, job->items + 5 * next[0], unit[1], unit[2] - unit[1], scale, bench);
    else
        for (int64_t head = unit[1]; head < unit[2]; head++) run_wide(job, item, head, scale, bench);
}

/* Merges a token's parts, by their largest scores. */
static void merge(const job_t *job, const int64_t *merged) {
    int64_t dim = job->dim, heads = job->kv_heads * job->group, width = dim + 2;
    float values[MAX_DIM];
    for (int64_t head = 0; head < heads; head++) {
        float largest = NO_SCORE, sum = 0.0f;
        memset(values, 0, sizeof(float) * dim);
        for (int64_t i = merged[1]; i < merged[2]; i++) {
            float most = job->parts[(i * heads + head) * width + dim + 1];
            largest = most > largest ? most : largest;
        }
        for (int64_t i = merged[1]; i < merged[2]; i++) {
            const float *part = job->parts + (i * heads + head) * width;
            float factor = exp2_of(part[dim + 1] - largest);
            for (int64_t d = 0; d < dim; d++) values[d] += factor * part[d];
            sum += factor * part[dim];
        }
        write_out(job, merged[0], head, values, 1.0f / sum);
    }
}

static void work(void *argument) {
    job_t *job = argument;
    int64_t thread = FETCH_ADD(&job->arrived);
    if (thread >= job->num_threads) return;
    /* 2^x replaces e^x, so the scale includes log2(e). */
    float scale = 1.44269504f, root = (float)job->dim;
    for (int i = 0; i < 20; i++) root = 0.5f * (root + job->dim / root);
    scale /= root;
    bench_t bench;
    bench.copies = job->scratch + thread * job->scratch_floats;
    bench.room = bench.copies + 2 * TILE * job->dim;
    for (int64_t unit; (unit = FETCH_ADD(&job->next_unit)) < job->num_units;) {
        int64_t next = unit + 1 < job->num_units ? unit + 1 : unit;
        run_unit(job, job->units + 3 * unit, job->units + 3 * next, scale, &bench);
    }
}

static void merge_all(void *argument) {
    job_t *job = argument;
    for (int64_t i; (i = FETCH_ADD(&job->next_merge)) < job->num_merges;) merge(job, job->merges + 3 * i);
}

/* Floats of scratch for a thread: `rows` is tokens times group of the largest item, `heads` the KV heads of a unit. */
int64_t neaptide_attention_scratch(int64_t dim, int64_t rows, int64_t heads) {
    int64_t padded = (rows + LANES - 1) / LANES * LANES;
    return 2 * TILE * dim + padded * TILE + 2 * heads * padded * (dim + 2) + LINE;
}

int64_t neaptide_attention_job_bytes(void) { return sizeof(job_t); }

void neaptide_attention(job_t *job) {
    typedef void (*parallel_t)(void (*)(void *), void *, unsigned, unsigned);
    parallel_t parallel = (parallel_t)job->parallel;
    job->next_unit = job->next_merge = job->arrived = 0;
    if (!parallel || job->num_threads == 1 || job->num_units == 1) {
        work(job);
        merge_all(job);
        return;
    }
    parallel(work, job, (unsigned)job->num_threads, 0);
    if (job->num_merges) parallel(merge_all, job, (unsigned)job->num_threads, 0);
}
