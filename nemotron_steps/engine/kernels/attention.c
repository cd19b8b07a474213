/* Causal attention of flat tokens with shared prompts, from the QKV projection on, with its gradient: QK-norm, rotary
 * embedding (halves), attention, as fused.py has them in torch.
 *
 * A unit is a whole row and one of its key-value heads, with all suffixes that continue that row; units are parted among
 * threads and write to places of their own. Scores are not kept: the gradient computes them again from their
 * log-sum-exp. Nothing is padded but blocks in scratch.
 *
 * Shapes: T tokens, h key-value heads, R query heads for each, D head size; a slot is one of R queries and a key.
 */
#include <omp.h>

#include "products.h"

enum { ROWS = 64 }; /* queries of a block; a query is a (token, query head) */

typedef struct {
    const float *mixed;   /* [T, h, R + 2, D], projections: queries, key, value */
    const float *norm;    /* [R + 1, D] or null */
    const float *cos_sin; /* [2, T, D] */
    float *attended;      /* [T, h, R, D] */
    float *lse;           /* [T, h, R] */
    const float *grad;    /* of attended */
    float *grad_mixed;    /* [T, h, R + 2, D] */
    float *grad_norm;     /* [wholes, h, R + 1, D], a share of each unit */
    const int32_t *whole;        /* [wholes + 1], first token of each */
    const int32_t *suffix;       /* [suffixes + 1], first token of each, counted from `suffix_tokens` */
    const int64_t *first_suffix; /* [wholes + 1], suffixes of each whole row */
    int64_t wholes, suffix_tokens, tokens, heads, queries, dim, longest_whole, longest_suffix;
    float eps;
} Attention;

/* Keys and values of consecutive tokens, as products take them. */
typedef struct {
    int64_t first, count; /* tokens */
    float *key_panels, *value_panels;             /* transposed, packed */
    float *keys, *values, *grad_keys, *grad_values; /* [count, padded(D)] */
} Keys;

INLINE const float *slot_of(const Attention *a, int64_t token, int64_t head, int64_t slot) {
    return a->mixed + ((token * a->heads + head) * (a->queries + 2) + slot) * a->dim;
}

/* Norm and rotation of one slot. */
INLINE void turn_by(const Attention *a, const float *in, int64_t token, int64_t slot, float *out, const int64_t dim) {
    int64_t half = dim / 2;
    const float *cosine = a->cos_sin + token * dim, *sine = cosine + a->tokens * dim;
    float inverse = 1.0f, scaled[dim];
    const float *norm = a->norm ? a->norm + slot * dim : 0;
    if (norm) {
        inverse = inverse_rms(in, dim, a->eps);
#pragma omp simd
        for (int64_t i = 0; i < dim; i++) scaled[i] = in[i] * inverse * norm[i];
        in = scaled;
    }
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        out[i] = in[i] * cosine[i] - in[i + half] * sine[i];
        out[i + half] = in[i + half] * cosine[i + half] + in[i] * sine[i + half];
    }
}

/* Gradient of `turn`: from that of its result to that of `in`; adds to the norm's. */
INLINE void turn_back_by(const Attention *a, const float *in, const float *grad, int64_t token, int64_t slot,
                         float *out, float *grad_norm, const int64_t dim) {
    int64_t half = dim / 2;
    const float *cosine = a->cos_sin + token * dim, *sine = cosine + a->tokens * dim;
    float back[dim];
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        back[i] = grad[i] * cosine[i] + grad[i + half] * sine[i + half];
        back[i + half] = grad[i + half] * cosine[i + half] - grad[i] * sine[i];
    }
    if (!a->norm) {
        memcpy(out, back, (size_t)dim * 4);
        return;
    }
    const float *norm = a->norm + slot * dim;
    float inverse = inverse_rms(in, dim, a->eps), along = 0.0f, *into = grad_norm + slot * dim;
#pragma omp simd reduction(+ : along)
    for (int64_t i = 0; i < dim; i++) {
        float unit = in[i] * inverse;
        into[i] += back[i] * unit;
        back[i] *= norm[i];
        along += back[i] * unit;
    }
    along /= (float)dim;
#pragma omp simd
    for (int64_t i = 0; i < dim; i++) out[i] = (back[i] - in[i] * inverse * along) * inverse;
}

/* Heads of a usual size are of a size that the compiler knows. */
static void turn(const Attention *a, const float *in, int64_t token, int64_t slot, float *out) {
    switch (a->dim) {
    case 32: turn_by(a, in, token, slot, out, 32); break;
    case 64: turn_by(a, in, token, slot, out, 64); break;
    case 128: turn_by(a, in, token, slot, out, 128); break;
    default: turn_by(a, in, token, slot, out, a->dim);
    }
}

static void turn_back(const Attention *a, const float *in, const float *grad, int64_t token, int64_t slot, float *out,
                      float *grad_norm) {
    switch (a->dim) {
    case 32: turn_back_by(a, in, grad, token, slot, out, grad_norm, 32); break;
    case 64: turn_back_by(a, in, grad, token, slot, out, grad_norm, 64); break;
    case 128: turn_back_by(a, in, grad, token, slot, out, grad_norm, 128); break;
    default: turn_back_by(a, in, grad, token, slot, out, grad_norm, a->dim);
    }
}

/* Room for `count` tokens, taken from scratch. */
static float *reserve(const Attention *a, Keys *k, int64_t count, float *scratch) {
    int64_t panels = padded(count) * a->dim, rows = whole_blocks(count) * padded(a->dim);
    k->key_panels = scratch, k->value_panels = scratch + panels, scratch += 2 * panels;
    k->keys = scratch, k->values = k->keys + rows, k->grad_keys = k->values + rows, k->grad_values = k->grad_keys + rows;
    return scratch + 4 * rows;
}

static int64_t reserved(const Attention *a, int64_t count) {
    return 2 * padded(count) * a->dim + 4 * whole_blocks(count) * padded(a->dim);
}

/* [count, D] with rows of padded(D) → packed panels of the transposed matrix, [count / PANEL, D, PANEL] */
static void transpose(const float *rows, int64_t count, int64_t dim, float *panels) {
    for (int64_t n = 0; n < padded(count); n += PANEL)
        for (int64_t i = 0; i < dim; i++)
            for (int64_t j = 0; j < PANEL; j++)
                panels[n * dim + i * PANEL + j] = n + j < count ? rows[(n + j) * padded(dim) + i] : 0.0f;
}

static void read_keys(const Attention *a, int64_t head, int64_t first, int64_t count, Keys *k, int backward) {
    int64_t width = padded(a->dim);
    k->first = first, k->count = count;
    for (int64_t j = 0; j < count; j++) {
        const float *key = slot_of(a, first + j, head, a->queries);
        turn(a, key, first + j, a->queries, k->keys + j * width);
        memcpy(k->values + j * width, key + a->dim, (size_t)a->dim * 4);
        for (int64_t i = a->dim; i < width; i++) k->keys[j * width + i] = k->values[j * width + i] = 0.0f;
    }
    transpose(k->keys, count, a->dim, k->key_panels);
    if (!backward) return;
    transpose(k->values, count, a->dim, k->value_panels);
    memset(k->grad_keys, 0, (size_t)(whole_blocks(count) * width) * 4);
    memset(k->grad_values, 0, (size_t)(whole_blocks(count) * width) * 4);
}

static void write_gradients(const Attention *a, int64_t head, const Keys *k, float *grad_norm) {
    int64_t width = padded(a->dim);
    for (int64_t j = 0; j < k->count; j++) {
        const float *key = slot_of(a, k->first + j, head, a->queries);
        float *into = a->grad_mixed + (key - a->mixed);
        turn_back(a, key, k->grad_keys + j * width, k->first + j, a->queries, into, grad_norm);
        memcpy(into + a->dim, k->grad_values + j * width, (size_t)a->dim * 4);
    }
}

/* A block of queries of consecutive tokens: they see all of `far` (if any), and `near` up to themselves. */
typedef struct {
    int64_t begin, count; /* of the near run's (token, query head) pairs */
    int64_t seen;         /* near keys that any of them sees */
    int64_t far_width, width;
    float *query, *scores, *result, *grad, *grad_scores; /* [ROWS, ...] */
} Queries;

static int64_t block_scratch(const Attention *a) {
    int64_t keys = padded(a->longest_whole) + padded(a->longest_suffix);
    return ROWS * (3 * padded(a->dim) + 2 * keys);
}

INLINE void place(Queries *q, int64_t dim, float *scratch, int64_t most_keys) {
    q->query = scratch, q->result = q->query + ROWS * padded(dim), q->grad = q->result + ROWS * padded(dim);
    q->scores = q->grad + ROWS * padded(dim), q->grad_scores = q->scores + ROWS * most_keys;
}

/* Attention weights of the block: softmax of each row over what it sees, 0 elsewhere. The gradient knows the row's
 * log-sum-exp (`known`), so that exp(score − lse) is the weight; else it is found here. */
INLINE void weigh(const Attention *a, int64_t head, const Keys *far, const Keys *near, Queries *q, int known) {
    int64_t dim = a->dim, width = padded(dim), far_count = far ? far->count : 0;
    float scale = 1.0f / sqrtf((float)dim);
    q->seen = (q->begin + q->count - 1) / a->queries + 1;
    q->far_width = padded(far_count), q->width = q->far_width + padded(q->seen);
    for (int64_t i = 0; i < whole_blocks(q->count); i++) {
        float *query = q->query + i * width;
        memset(query, 0, (size_t)width * 4);
        if (i >= q->count) continue;
        int64_t at = q->begin + i, token = near->first + at / a->queries, slot = at % a->queries;
        turn(a, slot_of(a, token, head, slot), token, slot, query);
    }
    Strided queries = rows_of(q->query, width);
    if (far) product(queries, q->count, dim, packed(far->key_panels, dim), far_count, q->scores, q->width, 0);
    product(queries, q->count, dim, packed(near->key_panels, dim), q->seen, q->scores + q->far_width, q->width, 0);
    for (int64_t i = 0; i < q->count; i++) {
        int64_t at = q->begin + i, token = near->first + at / a->queries, own = at / a->queries + 1;
        float *row = q->scores + i * q->width, *mine = row + q->far_width, most = -INFINITY, total = 0.0f;
        float *lse = a->lse + (token * a->heads + head) * a->queries + at % a->queries;
        if (known) {
            most = *lse;
        } else {
#pragma omp simd reduction(max : most)
            for (int64_t j = 0; j < far_count; j++) most = row[j] > most ? row[j] : most;
#pragma omp simd reduction(max : most)
            for (int64_t j = 0; j < own; j++) most = mine[j] > most ? mine[j] : most;
            most *= scale;
        }
#pragma omp simd reduction(+ : total)
        for (int64_t j = 0; j < far_count; j++) total += row[j] = fast_exp(row[j] * scale - most);
#pragma omp simd reduction(+ : total)
        for (int64_t j = 0; j < own; j++) total += mine[j] = fast_exp(mine[j] * scale - most);
        for (int64_t j = far_count; j < q->far_width; j++) row[j] = 0.0f;
        for (int64_t j = own; j < q->width - q->far_width; j++) mine[j] = 0.0f;
        if (known) continue;
        *lse = most + logf(total);
        float inverse = 1.0f / total;
#pragma omp simd
        for (int64_t j = 0; j < q->width; j++) row[j] *= inverse;
    }
}

/* result = weights · values */
INLINE void forward_block(const Attention *a, int64_t head, const Keys *far, const Keys *near, Queries *q) {
    int64_t dim = a->dim, width = padded(dim);
    weigh(a, head, far, near, q, 0);
    if (far)
        product(rows_of(q->scores, q->width), q->count, far->count, columns_of(far->values, width), dim, q->result,
                width, 0);
    product(rows_of(q->scores + q->far_width, q->width), q->count, q->seen, columns_of(near->values, width), dim,
            q->result, width, far != 0);
    for (int64_t i = 0; i < q->count; i++) {
        int64_t at = q->begin + i, token = near->first + at / a->queries;
        float *into = a->attended + ((token * a->heads + head) * a->queries + at % a->queries) * dim;
        memcpy(into, q->result + i * width, (size_t)dim * 4);
    }
}

/* With P = weights, G = gradient of the result: values P' G; scores dS = P (G V' − row sums of P G V'); queries dS K; keys
 * dS' Q. */
INLINE void backward_block(const Attention *a, int64_t head, const Keys *far, const Keys *near, Queries *q,
                           float *grad_norm) {
    int64_t dim = a->dim, width = padded(dim), far_count = far ? far->count : 0;
    float scale = 1.0f / sqrtf((float)dim);
    weigh(a, head, far, near, q, 1);
    memset(q->grad, 0, (size_t)(ROWS * width) * 4);
    for (int64_t i = 0; i < q->count; i++) {
        int64_t at = q->begin + i, token = near->first + at / a->queries;
        const float *from = a->grad + ((token * a->heads + head) * a->queries + at % a->queries) * dim;
        memcpy(q->grad + i * width, from, (size_t)dim * 4);
    }
    Strided grads = rows_of(q->grad, width), weights = transposed(q->scores, q->width);
    Strided near_weights = transposed(q->scores + q->far_width, q->width);
    if (far) {
        product(weights, far_count, q->count, columns_of(q->grad, width), dim, far->grad_values, width, 1);
        product(grads, q->count, dim, packed(far->value_panels, dim), far_count, q->grad_scores, q->width, 0);
    }
    product(near_weights, q->seen, q->count, columns_of(q->grad, width), dim, near->grad_values, width, 1);
    product(grads, q->count, dim, packed(near->value_panels, dim), q->seen, q->grad_scores + q->far_width, q->width, 0);
    for (int64_t i = 0; i < q->count; i++) {
        const float *weight = q->scores + i * q->width;
        float *grad = q->grad_scores + i * q->width, along = dot(weight, grad, q->width);
#pragma omp simd
        for (int64_t j = 0; j < q->width; j++) grad[j] = weight[j] * (grad[j] - along) * scale;
    }
    Strided scores = rows_of(q->grad_scores, q->width), near_scores = rows_of(q->grad_scores + q->far_width, q->width);
    if (far) {
        product(transposed(q->grad_scores, q->width), far_count, q->count, columns_of(q->query, width), dim,
                far->grad_keys, width, 1);
        product(scores, q->count, far_count, columns_of(far->keys, width), dim, q->result, width, 0);
    }
    product(transposed(q->grad_scores + q->far_width, q->width), q->seen, q->count, columns_of(q->query, width), dim,
            near->grad_keys, width, 1);
    product(near_scores, q->count, q->seen, columns_of(near->keys, width), dim, q->result, width, far != 0);
    for (int64_t i = 0; i < q->count; i++) {
        int64_t at = q->begin + i, token = near->first + at / a->queries, slot = at % a->queries;
        const float *query = slot_of(a, token, head, slot);
        turn_back(a, query, q->result + i * width, token, slot, a->grad_mixed + (query - a->mixed), grad_norm);
    }
}

/* Queries of the run `near`, block by block. */
static void run(const Attention *a, int64_t head, const Keys *far, const Keys *near, Queries *q, float *grad_norm) {
    int64_t all = near->count * a->queries;
    for (q->begin = 0; q->begin < all; q->begin += ROWS) {
        q->count = all - q->begin < ROWS ? all - q->begin : ROWS;
        if (grad_norm) backward_block(a, head, far, near, q, grad_norm);
        else forward_block(a, head, far, near, q);
    }
}

static void unit(const Attention *a, int64_t whole, int64_t head, float *scratch, int backward) {
    Keys prompt, own;
    Queries queries;
    float *grad_norm = backward ? a->grad_norm + (whole * a->heads + head) * (a->queries + 1) * a->dim : 0;
    if (backward) memset(grad_norm, 0, (size_t)((a->queries + 1) * a->dim) * 4);
    scratch = reserve(a, &prompt, a->longest_whole, scratch);
    scratch = reserve(a, &own, a->longest_suffix, scratch);
    place(&queries, a->dim, scratch, padded(a->longest_whole) + padded(a->longest_suffix));
    read_keys(a, head, a->whole[whole], a->whole[whole + 1] - a->whole[whole], &prompt, backward);
    run(a, head, 0, &prompt, &queries, grad_norm);
    for (int64_t s = a->first_suffix[whole]; s < a->first_suffix[whole + 1]; s++) {
        read_keys(a, head, a->suffix_tokens + a->suffix[s], a->suffix[s + 1] - a->suffix[s], &own, backward);
        run(a, head, &prompt, &own, &queries, grad_norm);
        if (backward) write_gradients(a, head, &own, grad_norm);
    }
    if (backward) write_gradients(a, head, &prompt, grad_norm);
}

/* Floats of scratch that each thread needs. */
int64_t attention_scratch(const Attention *a) {
    return reserved(a, a->longest_whole) + reserved(a, a->longest_suffix) + block_scratch(a);
}

/* Fills attended and lse; with `backward`, fills grad_mixed and grad_norm from those.
 * scratch: attention_scratch of each thread, in which nothing is read before it is written. */
void attention(const Attention *a, int64_t backward, int64_t threads, float *scratch) {
    int64_t each = attention_scratch(a);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t u = 0; u < a->wholes * a->heads; u++)
        unit(a, u / a->heads, u % a->heads, scratch + omp_get_thread_num() * each, backward != 0);
}
