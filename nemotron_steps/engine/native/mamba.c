/* The Mamba-2 mixer between its two projections, with its gradient: convolution with SiLU, time steps, recurrence, gate
 * and grouped norm, as engine/policy/mamba/mixer.py has them in torch.
 *
 * A unit is a row that begins empty, with all rows that continue it (a shared prompt and its suffixes: a family), and
 * one group of heads, which shares B, C and a norm. Units are parted among threads and write to places of their own, so
 * that no sum depends on which thread had it. The gradient keeps the projection alone: it computes all else again, and
 * states from those at every few tokens.
 *
 * Shapes: T tokens, H heads of P, G groups, N state, K kernel. A unit has R = H / G heads and W = R · P + 2 N columns of
 * x, B, C; its buffers hold the family's tokens, row after row.
 */
#include <omp.h>

#include "vectors.h"

typedef struct {
    const float *mixed;                 /* [T, 2 H P + 2 G N + H]: z, x, B, C, dt */
    const float *taps, *bias;           /* [K, H P + 2 G N]; [H P + 2 G N] or null */
    const float *dt_bias, *a, *d;       /* [H] */
    const float *norm;                  /* [H P] */
    float *out;                         /* [T, H P] */
    const float *grad;                  /* of out */
    float *grad_mixed;                  /* as mixed */
    float *shares;                      /* [roots, …], each root's part of the gradients of taps, bias, dt_bias, a, d, norm */
    const int64_t *starts;              /* [rows + 1], first token of each row */
    const int64_t *first_child;         /* [roots + 1], rows that continue each root */
    int64_t roots, heads, head_dim, groups, state, kernel, most_tokens, most_rows, stride;
    float eps, least, most;             /* of the norm; of time steps */
} Mamba;

/* Buffers of one thread. */
typedef struct {
    float *before, *active, *grads;     /* [tokens, W]: before SiLU, after it, gradient of that */
    float *y, *grad_y;                  /* [tokens, R P] */
    float *raw, *dt, *decay, *grad_dt;  /* [tokens, R] */
    float *kept;                        /* [R, tokens / stride + rows, P N], states before every `stride` tokens of a row */
    float *run;                         /* [stride + 1, P N], states of those tokens */
    float *end, *grad_state, *grad_end; /* [P N] */
} Buffers;

/* A row of a family. */
typedef struct {
    int64_t first, count, place; /* token; tokens; first token in the buffers */
    int64_t kept;                /* first of its kept states */
} Row;

INLINE int64_t heads_of_group(const Mamba *m) { return m->heads / m->groups; }
INLINE int64_t inner_of(const Mamba *m) { return m->heads * m->head_dim; }
INLINE int64_t channels_of(const Mamba *m) { return inner_of(m) + 2 * m->groups * m->state; }
INLINE int64_t width_of(const Mamba *m) { return inner_of(m) + channels_of(m) + m->heads; }
INLINE int64_t columns_of(const Mamba *m) { return heads_of_group(m) * m->head_dim + 2 * m->state; }
INLINE int64_t kept_of(const Mamba *m) { return m->most_tokens / m->stride + m->most_rows; }

/* Floats of scratch for one thread. */
int64_t mamba_scratch(const Mamba *m) {
    int64_t each = heads_of_group(m), tokens = m->most_tokens, size = m->head_dim * m->state;
    int64_t flat = tokens * (3 * columns_of(m) + 2 * each * m->head_dim + 4 * each);
    return flat + (each * kept_of(m) + m->stride + 4) * size;
}

static Buffers reserve(const Mamba *m, float *scratch) {
    int64_t each = heads_of_group(m), tokens = m->most_tokens, size = m->head_dim * m->state;
    Buffers b;
    float **tokenwise[] = {&b.before, &b.active, &b.grads, &b.y, &b.grad_y, &b.raw, &b.dt, &b.decay, &b.grad_dt};
    for (int i = 0; i < 9; i++) {
        *tokenwise[i] = scratch;
        scratch += tokens * (i < 3 ? columns_of(m) : i < 5 ? each * m->head_dim : each);
    }
    b.kept = scratch, scratch += each * kept_of(m) * size;
    b.run = scratch, scratch += (m->stride + 1) * size;
    b.end = scratch, b.grad_state = b.end + size, b.grad_end = b.grad_state + size;
    return b;
}

/* Channels of a group lie in three runs among x, B, C: their first among the channels, and their number. */
INLINE int64_t channel_run(const Mamba *m, int64_t group, int part, int64_t *count) {
    int64_t own = heads_of_group(m) * m->head_dim;
    *count = part ? m->state : own;
    return part ? inner_of(m) + ((part - 1) * m->groups + group) * m->state : group * own;
}

/* What is convolved `back` tokens before one of a row: null before the beginning. */
INLINE int64_t seen(const Row *row, const Row *parent, int64_t t, int64_t back) {
    if (t >= back) return row->first + t - back;
    if (parent == row) return -1;
    int64_t before = parent->count - (back - t);
    return before < 0 ? -1 : parent->first + before;
}

/* Convolution, SiLU, time steps and decays of one row. */
static void prepare(const Mamba *m, const Row *row, const Row *parent, int64_t group, const Buffers *b) {
    int64_t each = heads_of_group(m), columns = columns_of(m), channels = channels_of(m), width = width_of(m);
    const float *inputs = m->mixed + inner_of(m);
    for (int64_t t = 0; t < row->count; t++) {
        float *before = b->before + (row->place + t) * columns, *active = b->active + (row->place + t) * columns;
        for (int part = 0; part < 3; part++) {
            int64_t count, first = channel_run(m, group, part, &count);
            for (int64_t i = 0; i < count; i++) before[i] = m->bias ? m->bias[first + i] : 0.0f;
            for (int64_t back = m->kernel - 1; back >= 0; back--) {
                int64_t token = seen(row, parent, t, back);
                if (token < 0) continue;
                const float *in = inputs + token * width + first, *tap = m->taps + (m->kernel - 1 - back) * channels + first;
#pragma omp simd
                for (int64_t i = 0; i < count; i++) before[i] += tap[i] * in[i];
            }
            before += count;
        }
        before -= columns;
#pragma omp simd
        for (int64_t i = 0; i < columns; i++) active[i] = before[i] * sigmoid(before[i]);
        const float *raw = inputs + (row->first + t) * width + channels + group * each;
        int64_t at = (row->place + t) * each;
        for (int64_t i = 0; i < each; i++) {
            float v = raw[i] + m->dt_bias[group * each + i], dt = v > 20.0f ? v : log1pf(expf(v));
            dt = dt < m->least ? m->least : dt > m->most ? m->most : dt;
            b->raw[at + i] = v, b->dt[at + i] = dt, b->decay[at + i] = expf(dt * m->a[group * each + i]);
        }
    }
}

/* The recurrence of one head over one row from `state` on, which it changes; keeps states where `kept` is not null. */
INLINE void scan_by(const Mamba *m, const Row *row, int64_t group, int64_t head, const Buffers *b, float *state,
                    float *kept, const int64_t N) {
    int64_t each = heads_of_group(m), columns = columns_of(m), dim = m->head_dim;
    float skip = m->d[group * each + head];
    for (int64_t t = 0; t < row->count; t++) {
        int64_t at = row->place + t;
        if (kept && t % m->stride == 0)
            memcpy(kept + (row->kept + t / m->stride) * dim * N, state, (size_t)(dim * N) * 4);
        const float *x = b->active + at * columns + head * dim, *B = b->active + at * columns + each * dim, *C = B + N;
        float dt = b->dt[at * each + head], decay = b->decay[at * each + head], *y = b->y + (at * each + head) * dim;
        for (int64_t p = 0; p < dim; p++) {
            float into = dt * x[p], sum = 0.0f, *h = state + p * N;
#pragma omp simd reduction(+ : sum)
            for (int64_t n = 0; n < N; n++) {
                float next = h[n] * decay + into * B[n];
                h[n] = next;
                sum += next * C[n];
            }
            y[p] = sum + skip * x[p];
        }
    }
}

/* Gradient of `scan_by`, from that of y and of the state after the row (`grad`, which becomes that before the row). */
INLINE void scan_back_by(const Mamba *m, const Row *row, int64_t group, int64_t head, const Buffers *b, float *grad,
                         const float *kept, float *grad_a, float *grad_d, const int64_t N) {
    int64_t each = heads_of_group(m), columns = columns_of(m), dim = m->head_dim, size = dim * N;
    float rate = m->a[group * each + head], skip = m->d[group * each + head], for_rate = 0.0f, for_skip = 0.0f;
    for (int64_t part = (row->count - 1) / m->stride; part >= 0; part--) {
        int64_t begin = part * m->stride, after = begin + m->stride < row->count ? begin + m->stride : row->count;
        memcpy(b->run, kept + (row->kept + part) * size, (size_t)size * 4);
        for (int64_t t = begin; t < after; t++) {
            int64_t at = row->place + t;
            const float *x = b->active + at * columns + head * dim, *B = b->active + at * columns + each * dim;
            const float *state = b->run + (t - begin) * size;
            float dt = b->dt[at * each + head], decay = b->decay[at * each + head], *next = b->run + (t - begin + 1) * size;
            for (int64_t p = 0; p < dim; p++) {
                float into = dt * x[p];
#pragma omp simd
                for (int64_t n = 0; n < N; n++) next[p * N + n] = state[p * N + n] * decay + into * B[n];
            }
        }
        for (int64_t t = after - 1; t >= begin; t--) {
            int64_t at = row->place + t;
            const float *x = b->active + at * columns + head * dim, *B = b->active + at * columns + each * dim, *C = B + N;
            const float *state = b->run + (t - begin) * size, *next = state + size;
            const float *grad_y = b->grad_y + (at * each + head) * dim;
            float *grad_x = b->grads + at * columns + head * dim, *grad_B = b->grads + at * columns + each * dim;
            float dt = b->dt[at * each + head], decay = b->decay[at * each + head], for_dt = 0.0f, for_decay = 0.0f;
            float for_B[N], for_C[N], decays[N];
            for (int64_t n = 0; n < N; n++) for_B[n] = for_C[n] = decays[n] = 0.0f;
            for (int64_t p = 0; p < dim; p++) {
                float g = grad_y[p], into = dt * x[p], sum = 0.0f, *dh = grad + p * N;
                const float *h = next + p * N, *before = state + p * N;
#pragma omp simd reduction(+ : sum)
                for (int64_t n = 0; n < N; n++) {
                    float total = dh[n] + g * C[n];
                    for_C[n] += g * h[n];
                    for_B[n] += total * into;
                    sum += total * B[n];
                    decays[n] += total * before[n];
                    dh[n] = total * decay;
                }
                grad_x[p] = sum * dt + skip * g;
                for_dt += sum * x[p];
                for_skip += g * x[p];
            }
#pragma omp simd reduction(+ : for_decay)
            for (int64_t n = 0; n < N; n++) {
                grad_B[n] += for_B[n];
                grad_B[N + n] += for_C[n];
                for_decay += decays[n];
            }
            b->grad_dt[at * each + head] = for_dt + for_decay * decay * rate;
            for_rate += for_decay * decay * dt;
        }
    }
    *grad_a += for_rate, *grad_d += for_skip;
}

/* States of a usual size are of a size that the compiler knows. */
static void scan(const Mamba *m, const Row *row, int64_t group, int64_t head, const Buffers *b, float *state,
                 float *kept) {
    switch (m->state) {
    case 16: scan_by(m, row, group, head, b, state, kept, 16); break;
    case 32: scan_by(m, row, group, head, b, state, kept, 32); break;
    case 64: scan_by(m, row, group, head, b, state, kept, 64); break;
    case 128: scan_by(m, row, group, head, b, state, kept, 128); break;
    default: scan_by(m, row, group, head, b, state, kept, m->state);
    }
}

static void scan_back(const Mamba *m, const Row *row, int64_t group, int64_t head, const Buffers *b, float *grad,
                      const float *kept, float *grad_a, float *grad_d) {
    switch (m->state) {
    case 16: scan_back_by(m, row, group, head, b, grad, kept, grad_a, grad_d, 16); break;
    case 32: scan_back_by(m, row, group, head, b, grad, kept, grad_a, grad_d, 32); break;
    case 64: scan_back_by(m, row, group, head, b, grad, kept, grad_a, grad_d, 64); break;
    case 128: scan_back_by(m, row, group, head, b, grad, kept, grad_a, grad_d, 128); break;
    default: scan_back_by(m, row, group, head, b, grad, kept, grad_a, grad_d, m->state);
    }
}

/* y · silu(z), and 1 / its root mean square. */
INLINE float open_gate(const float *y, const float *z, int64_t count, float eps, float *opened) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) {
        opened[i] = y[i] * z[i] * sigmoid(z[i]);
        sum += opened[i] * opened[i];
    }
    return 1.0f / sqrtf(sum / (float)count + eps);
}

static void gate(const Mamba *m, const Row *row, int64_t group, const Buffers *b) {
    int64_t own = heads_of_group(m) * m->head_dim, inner = inner_of(m), width = width_of(m);
    const float *norm = m->norm + group * own;
    for (int64_t t = 0; t < row->count; t++) {
        const float *z = m->mixed + (row->first + t) * width + group * own;
        float *out = m->out + (row->first + t) * inner + group * own;
        float scale = open_gate(b->y + (row->place + t) * own, z, own, m->eps, out);
#pragma omp simd
        for (int64_t i = 0; i < own; i++) out[i] *= scale * norm[i];
    }
}

/* From the gradient of the output to that of y, of z, and of the norm's weight. */
static void gate_back(const Mamba *m, const Row *row, int64_t group, const Buffers *b, float *grad_norm) {
    int64_t own = heads_of_group(m) * m->head_dim, inner = inner_of(m), width = width_of(m);
    const float *norm = m->norm + group * own;
    for (int64_t t = 0; t < row->count; t++) {
        const float *z = m->mixed + (row->first + t) * width + group * own, *y = b->y + (row->place + t) * own;
        const float *grad = m->grad + (row->first + t) * inner + group * own;
        float *grad_z = m->grad_mixed + (row->first + t) * width + group * own, *grad_y = b->grad_y + (row->place + t) * own;
        float scale = open_gate(y, z, own, m->eps, grad_z), along = 0.0f; /* grad_z holds y · silu(z) for the moment */
#pragma omp simd reduction(+ : along)
        for (int64_t i = 0; i < own; i++) {
            float unit = grad_z[i] * scale;
            grad_norm[i] += grad[i] * unit;
            along += grad[i] * norm[i] * unit;
        }
        along /= (float)own;
#pragma omp simd
        for (int64_t i = 0; i < own; i++) {
            float opened = (grad[i] * norm[i] - grad_z[i] * scale * along) * scale, share = sigmoid(z[i]);
            grad_y[i] = opened * z[i] * share;
            grad_z[i] = opened * y[i] * share * (1.0f + z[i] * (1.0f - share));
        }
    }
}

/* From the gradients of x, B, C after SiLU and of the time steps to those of the projection. A row that continues
 * another adds to what that one's last tokens got. */
static void prepare_back(const Mamba *m, const Row *row, const Row *parent, int64_t group, const Buffers *b,
                         float *grad_taps, float *grad_bias, float *grad_dt_bias) {
    int64_t each = heads_of_group(m), columns = columns_of(m), channels = channels_of(m), width = width_of(m);
    const float *inputs = m->mixed + inner_of(m);
    float *grad_inputs = m->grad_mixed + inner_of(m);
    for (int64_t t = 0; t < row->count; t++) {
        float *grads = b->grads + (row->place + t) * columns;
        const float *before = b->before + (row->place + t) * columns;
#pragma omp simd
        for (int64_t i = 0; i < columns; i++) {
            float share = sigmoid(before[i]);
            grads[i] *= share * (1.0f + before[i] * (1.0f - share));
        }
        int64_t at = (row->place + t) * each;
        float *grad_raw = grad_inputs + (row->first + t) * width + channels + group * each;
        for (int64_t i = 0; i < each; i++) {
            float dt = b->dt[at + i], share = 1.0f / (1.0f + expf(-b->raw[at + i]));
            int limited = (m->least > 0.0f && dt <= m->least) || dt >= m->most;
            grad_raw[i] = limited ? 0.0f : b->grad_dt[at + i] * share;
            grad_dt_bias[group * each + i] += grad_raw[i];
        }
        int64_t offset = 0;
        for (int part = 0; part < 3; part++) {
            int64_t count, first = channel_run(m, group, part, &count);
            const float *own = grads + offset;
            offset += count;
            for (int64_t back = 0; back < m->kernel; back++) {
                int64_t token = seen(row, parent, t, back), tap = (m->kernel - 1 - back) * channels + first;
                if (token < 0) continue;
                const float *in = inputs + token * width + first;
                float *grad_in = grad_inputs + token * width + first;
                if (back == 0) /* the first to write there */
#pragma omp simd
                    for (int64_t i = 0; i < count; i++) grad_in[i] = m->taps[tap + i] * own[i];
                else
#pragma omp simd
                    for (int64_t i = 0; i < count; i++) grad_in[i] += m->taps[tap + i] * own[i];
#pragma omp simd
                for (int64_t i = 0; i < count; i++) grad_taps[tap + i] += own[i] * in[i];
            }
#pragma omp simd
            for (int64_t i = 0; i < count; i++) grad_bias[first + i] += own[i];
        }
    }
}

static Row row_of(const Mamba *m, int64_t number, const Row *last) {
    Row row = {m->starts[number], m->starts[number + 1] - m->starts[number], 0, 0};
    if (last) {
        row.place = last->place + last->count;
        row.kept = last->kept + (last->count - 1) / m->stride + 1;
    }
    return row;
}

static void family(const Mamba *m, int64_t root, int64_t group, const Buffers *b, int backward) {
    int64_t each = heads_of_group(m), own = each * m->head_dim, size = m->head_dim * m->state, channels = channels_of(m);
    int64_t first_child = m->first_child[root], children = m->first_child[root + 1] - first_child;
    Row rows[children + 1];
    rows[0] = row_of(m, root, 0);
    for (int64_t i = 0; i < children; i++) rows[i + 1] = row_of(m, first_child + i, &rows[i]);
    for (int64_t i = 0; i <= children; i++) prepare(m, &rows[i], &rows[0], group, b);
    for (int64_t head = 0; head < each; head++) {
        float *kept = backward ? b->kept + head * kept_of(m) * size : 0;
        memset(b->end, 0, (size_t)size * 4);
        scan(m, &rows[0], group, head, b, b->end, kept);
        for (int64_t i = 1; i <= children; i++) {
            memcpy(b->grad_state, b->end, (size_t)size * 4);
            scan(m, &rows[i], group, head, b, b->grad_state, kept);
        }
    }
    if (!backward) {
        for (int64_t i = 0; i <= children; i++) gate(m, &rows[i], group, b);
        return;
    }
    float *share = m->shares + root * ((m->kernel + 1) * channels + 3 * m->heads + inner_of(m));
    float *grad_bias = share + m->kernel * channels, *grad_dt_bias = grad_bias + channels;
    float *grad_a = grad_dt_bias + m->heads, *grad_d = grad_a + m->heads, *grad_norm = grad_d + m->heads + group * own;
    int64_t tokens = rows[children].place + rows[children].count;
    for (int64_t i = 0; i <= children; i++) gate_back(m, &rows[i], group, b, grad_norm);
    memset(b->grads, 0, (size_t)(tokens * columns_of(m)) * 4);
    for (int64_t head = 0; head < each; head++) {
        const float *kept = b->kept + head * kept_of(m) * size;
        float *for_a = grad_a + group * each + head, *for_d = grad_d + group * each + head;
        memset(b->grad_end, 0, (size_t)size * 4);
        for (int64_t i = children; i > 0; i--) {
            memset(b->grad_state, 0, (size_t)size * 4);
            scan_back(m, &rows[i], group, head, b, b->grad_state, kept, for_a, for_d);
            for (int64_t j = 0; j < size; j++) b->grad_end[j] += b->grad_state[j];
        }
        scan_back(m, &rows[0], group, head, b, b->grad_end, kept, for_a, for_d);
    }
    for (int64_t i = 0; i <= children; i++)
        prepare_back(m, &rows[i], &rows[0], group, b, share, grad_bias, grad_dt_bias);
}

/* Forward: writes out. Backward: grad_mixed, and adds to shares, which are zero. */
void mamba(const Mamba *m, int64_t backward, int64_t threads, float *scratch) {
    int64_t each = mamba_scratch(m);
#pragma omp parallel num_threads(threads)
    {
        Buffers b = reserve(m, scratch + omp_get_thread_num() * each);
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < m->roots * m->groups; unit++)
            family(m, unit / m->groups, unit % m->groups, &b, (int)backward);
    }
}
