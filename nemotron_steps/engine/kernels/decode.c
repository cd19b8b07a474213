/* One decoding step of a dense model small enough for the processor's cache: from the newest tokens to the next ones.
 *
 * Rows are parted among threads, which meet once, at the end of the step. A row's result does not depend on which other
 * rows there are: every sum runs in one order. The layout of weights and cache is embedded_model.py's; products read
 * weights as panels, PANEL outputs side by side: [outputs / PANEL, inputs, PANEL].
 *
 * Shapes: H hidden, F ffn, D head size, h key-value heads, R query heads for each, V vocabulary. Widths of buffers are
 * rounded up to whole panels.
 */
#include "products.h"

typedef struct {
    const float *input_norm, *qkv, *qkv_bias, *qk_norm, *output, *post_norm, *gate_up, *down;
} Layer;

typedef struct {
    const Layer *layers;
    const float *embedding; /* [V, H] */
    const float *head;      /* panels */
    const float *final_norm;
    const float *rotations; /* [positions, D / 2, 2], cosine and sine */
    int64_t num_layers, hidden, ffn, heads, queries, dim, vocab, positions;
    float eps;
} Model;

typedef struct {
    const float *keys, *values; /* [layers, heads, tokens, D] with the strides below */
    int64_t tokens, layer_stride, head_stride;
} Prefix;

typedef struct {
    float *keys, *values; /* [layers, most_rows, heads, columns, D] */
    int64_t *tokens;      /* [most_rows, columns] */
    float *logprobs;
    const int64_t *state; /* [most_rows, state_fields]: first column, column of position 0, of the first sampled token,
                             stream */
    const Prefix *prefixes;
    int64_t most_rows, columns, state_fields, column;
    float temperature; /* 0 is greedy */
} Batch;

/* out[rows, outputs] (+)= states[rows, inputs] Wᵀ */
static void linear(const float *states, int64_t inputs, const float *panels, int64_t outputs, float *out,
                   int64_t rows, int add) {
    product(rows_of(states, padded(inputs)), rows, inputs, packed(panels, inputs), outputs, out, padded(outputs), add);
}

INLINE void rms_norm(const float *states, const float *weight, float eps, int64_t width, float *out) {
    float inverse = inverse_rms(states, width, eps);
#pragma omp simd
    for (int64_t i = 0; i < width; i++) out[i] = states[i] * inverse * weight[i];
}

/* Norm and rotation of one head, in place; pairs are neighbours. */
INLINE void turn(float *head, const float *norm, const float *rotation, float eps, int64_t dim) {
    if (norm) rms_norm(head, norm, eps, dim, head);
#pragma omp simd
    for (int64_t i = 0; i < dim / 2; i++) {
        float even = head[2 * i], odd = head[2 * i + 1], cosine = rotation[2 * i], sine = rotation[2 * i + 1];
        head[2 * i] = even * cosine - odd * sine;
        head[2 * i + 1] = even * sine + odd * cosine;
    }
}

/* Scores of a query against `count` keys; returns the largest of them and `most`. */
INLINE float score(const float *query, const float *keys, int64_t count, float scale, float *scores, float most,
                   int64_t dim) {
    for (int64_t j = 0; j < count; j++) {
        scores[j] = dot(query, keys + j * dim, dim) * scale;
        most = scores[j] > most ? scores[j] : most;
    }
    return most;
}

INLINE void gather(const float *weights, const float *values, int64_t count, float *out, int64_t dim) {
    for (int64_t j = 0; j < count; j++)
#pragma omp simd
        for (int64_t i = 0; i < dim; i++) out[i] += weights[j] * values[j * dim + i];
}

/* exp(scores − most), and their sum */
INLINE float exponentials(float *scores, int64_t count, float most) {
    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (int64_t j = 0; j < count; j++) {
        scores[j] = fast_exp(scores[j] - most);
        total += scores[j];
    }
    return total;
}

/* Attention of one row's new token: qkv [h, (R + 2) · D] → out [h, R · D]. Writes the cache. */
INLINE void attend_heads(const Model *m, const Batch *b, int64_t l, int64_t row, float *qkv, float *out,
                         float *scores, const int64_t dim) {
    const int64_t *state = b->state + row * b->state_fields;
    const float *norm = m->layers[l].qk_norm, scale = 1.0f / sqrtf((float)dim);
    int64_t position = b->column - state[1];
    position = position < m->positions ? position : m->positions - 1;
    const float *rotation = m->rotations + position * dim;
    Prefix prefix = b->prefixes[row];
    int64_t own = b->column + 1 - state[0], all = prefix.tokens + own;
    for (int64_t h = 0; h < m->heads; h++) {
        float *mine = qkv + h * (m->queries + 2) * dim, *key = mine + m->queries * dim;
        int64_t at = ((l * b->most_rows + row) * m->heads + h) * b->columns * dim;
        float *keys = b->keys + at, *values = b->values + at;
        turn(key, norm ? norm + m->queries * dim : 0, rotation, m->eps, dim);
        memcpy(keys + b->column * dim, key, (size_t)dim * 4);
        memcpy(values + b->column * dim, key + dim, (size_t)dim * 4);
        int64_t far = l * prefix.layer_stride + h * prefix.head_stride;
        for (int64_t q = 0; q < m->queries; q++) {
            float *query = mine + q * dim, sums[dim];
            turn(query, norm ? norm + q * dim : 0, rotation, m->eps, dim);
            float most = -INFINITY;
            if (prefix.tokens) most = score(query, prefix.keys + far, prefix.tokens, scale, scores, most, dim);
            most = score(query, keys + state[0] * dim, own, scale, scores + prefix.tokens, most, dim);
            float inverse = 1.0f / exponentials(scores, all, most);
            for (int64_t i = 0; i < dim; i++) sums[i] = 0.0f;
            if (prefix.tokens) gather(scores, prefix.values + far, prefix.tokens, sums, dim);
            gather(scores + prefix.tokens, values + state[0] * dim, own, sums, dim);
            float *result = out + (h * m->queries + q) * dim;
#pragma omp simd
            for (int64_t i = 0; i < dim; i++) result[i] = sums[i] * inverse;
        }
    }
}

static void attend(const Model *m, const Batch *b, int64_t l, int64_t row, float *qkv, float *out, float *scores) {
    switch (m->dim) { /* known to the compiler, where heads have a usual size */
    case 32: attend_heads(m, b, l, row, qkv, out, scores, 32); break;
    case 64: attend_heads(m, b, l, row, qkv, out, scores, 64); break;
    case 128: attend_heads(m, b, l, row, qkv, out, scores, 128); break;
    default: attend_heads(m, b, l, row, qkv, out, scores, m->dim);
    }
}

/* SplitMix64 of a row's stream, as embedded_sampling.stream_uniforms */
INLINE double uniform(int64_t stream, int64_t drawn) {
    uint64_t x = (uint64_t)stream + (uint64_t)(drawn + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    x ^= x >> 31;
    return (double)(x >> 11) * 0x1p-53;
}

/* As embedded_sampling.sample: the token at which the cumulative weight passes the row's uniform share of the total. */
static void draw(const Batch *b, int64_t row, float *logits, int64_t vocab) {
    const int64_t *state = b->state + row * b->state_fields;
    int64_t next = b->column + 1, token = 0;
    float most = -INFINITY;
    if (b->temperature != 0.0f && b->temperature != 1.0f)
        for (int64_t v = 0; v < vocab; v++) logits[v] *= 1.0f / b->temperature;
#pragma omp simd reduction(max : most)
    for (int64_t v = 0; v < vocab; v++) most = logits[v] > most ? logits[v] : most;
    if (b->temperature == 0.0f)
        while (token < vocab - 1 && logits[token] != most) token++;
    exponentials(logits, vocab, most);
    double total = 0.0, passed = 0.0;
    for (int64_t v = 0; v < vocab; v++) total += logits[v];
    if (b->temperature != 0.0f) {
        double target = uniform(state[3], next - state[2]) * total;
        /* Past the end only for NaN logits, which are reported when the completion ends. */
        for (; token < vocab - 1; token++) {
            passed += logits[token];
            if (passed > target) break;
        }
    }
    b->tokens[row * b->columns + next] = token;
    b->logprobs[row * b->columns + next] = logf((float)(logits[token] / total));
}

/* Floats of scratch that a thread needs for `rows` rows that attend to at most `keys` keys. */
int64_t decode_scratch(const Model *m, int64_t rows, int64_t keys) {
    int64_t heads = m->heads * (m->queries + 2) * m->dim;
    int64_t wide = padded(heads) + padded(m->heads * m->queries * m->dim) + 2 * padded(m->hidden);
    int64_t ffn = padded(2 * m->ffn) + padded(m->ffn), most = ffn > padded(m->vocab) ? ffn : padded(m->vocab);
    return (rows + BLOCK) * (wide + most) + keys;
}

/* Rows [first, last) of a step. */
static void decode_rows(const Model *m, const Batch *b, int64_t first, int64_t last, float *scratch) {
    int64_t count = last - first, rows = whole_blocks(count), hidden = padded(m->hidden);
    int64_t fused = m->heads * (m->queries + 2) * m->dim, attending = m->heads * m->queries * m->dim;
    float *x = scratch, *normed = x + rows * hidden, *qkv = normed + rows * hidden;
    float *attended = qkv + rows * padded(fused), *gate_up = attended + rows * padded(attending);
    float *activated = gate_up + rows * padded(2 * m->ffn), *logits = gate_up;
    int64_t ffn = rows * (padded(2 * m->ffn) + padded(m->ffn)), head = rows * padded(m->vocab);
    float *scores = gate_up + (ffn > head ? ffn : head);
    for (int64_t r = 0; r < count; r++) {
        const int64_t *token = b->tokens + (first + r) * b->columns + b->column;
        memcpy(x + r * hidden, m->embedding + *token * m->hidden, (size_t)m->hidden * 4);
    }
    for (int64_t l = 0; l < m->num_layers; l++) {
        const Layer *layer = m->layers + l;
        for (int64_t r = 0; r < count; r++)
            rms_norm(x + r * hidden, layer->input_norm, m->eps, m->hidden, normed + r * hidden);
        linear(normed, m->hidden, layer->qkv, fused, qkv, rows, 0);
        for (int64_t r = 0; r < count; r++) {
            float *mine = qkv + r * padded(fused);
            if (layer->qkv_bias)
#pragma omp simd
                for (int64_t i = 0; i < fused; i++) mine[i] += layer->qkv_bias[i];
            attend(m, b, l, first + r, mine, attended + r * padded(attending), scores);
        }
        linear(attended, attending, layer->output, m->hidden, x, rows, 1);
        for (int64_t r = 0; r < count; r++)
            rms_norm(x + r * hidden, layer->post_norm, m->eps, m->hidden, normed + r * hidden);
        linear(normed, m->hidden, layer->gate_up, 2 * m->ffn, gate_up, rows, 0);
        for (int64_t r = 0; r < count; r++) {
            const float *gate = gate_up + r * padded(2 * m->ffn), *up = gate + m->ffn;
            float *out = activated + r * padded(m->ffn);
#pragma omp simd
            for (int64_t i = 0; i < m->ffn; i++) out[i] = gate[i] * sigmoid(gate[i]) * up[i];
        }
        linear(activated, m->ffn, layer->down, m->hidden, x, rows, 1);
    }
    for (int64_t r = 0; r < count; r++)
        rms_norm(x + r * hidden, m->final_norm, m->eps, m->hidden, normed + r * hidden);
    linear(normed, m->hidden, m->head, m->vocab, logits, rows, 0);
    for (int64_t r = 0; r < count; r++) draw(b, first + r, logits + r * padded(m->vocab), m->vocab);
}

/* Feed the tokens of the batch's column, rows [0, rows), and sample those of the next.
 * scratch: [threads, scratch_each] floats, finite at first. */
void decode_step(const Model *m, const Batch *b, int64_t rows, int64_t threads, float *scratch,
                 int64_t scratch_each) {
    int64_t blocks = (rows + BLOCK - 1) / BLOCK;
    if (threads > blocks) threads = blocks;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t t = 0; t < threads; t++) {
        int64_t first = blocks * t / threads * BLOCK, last = blocks * (t + 1) / threads * BLOCK;
        decode_rows(m, b, first, last < rows ? last : rows, scratch + t * scratch_each);
    }
}
