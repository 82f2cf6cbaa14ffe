// The C ABI of sampling.h: arrays of `rows` rows, contiguous.

#include "sampling.h"

extern "C" {

void paceline_argmax(int64_t rows, int64_t vocab, const float* logits, int64_t* out) {
#pragma omp parallel for schedule(static) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) out[row] = argmax_of(logits + row * vocab, vocab);
}

void paceline_mask(int64_t, int64_t vocab, float* logits, int64_t count, const int64_t* rows, const uint32_t* bitmask) {
    const int64_t words = (vocab + 31) / 32;
#pragma omp parallel for schedule(static) if (count > 1)
    for (int64_t i = 0; i < count; i++) {
        float* row = logits + rows[i] * vocab;
        for (int64_t word = 0; word < words; word++) {
            const uint32_t bits = bitmask[i * words + word];
            if (bits == 0xFFFFFFFFu) continue;
            const int64_t first = 32 * word;
            const int size = (int)std::min((int64_t)32, vocab - first);
            for (int bit = 0; bit < size; bit++) row[first + bit] = bits >> bit & 1 ? row[first + bit] : -INF;
        }
    }
}

void paceline_truncate(
    int64_t rows, int64_t vocab, float* logits, const float* temperature, const int64_t* top_k, const float* top_p,
    const float* min_p, const float* typical_p, int64_t normalise
) {
    // Dynamic: rows differ in what they ask for.
#pragma omp parallel for schedule(dynamic) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        static thread_local Selection selection;
        const Limits limits{temperature[row], top_p[row], min_p[row], typical_p[row], top_k[row]};
        truncate_row(logits + row * vocab, vocab, limits, selection);
        // Here the row is still in the cache.
        if (normalise) softmax_row(logits + row * vocab, vocab, temperature[row]);
    }
}

void paceline_softmax(int64_t rows, int64_t vocab, float* logits, const float* temperature) {
#pragma omp parallel for schedule(static) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) softmax_row(logits + row * vocab, vocab, temperature[row]);
}

void paceline_gumbel_argmax(
    int64_t rows, int64_t vocab, const float* logits, const float* temperature, const int64_t* keys, int64_t* out
) {
#pragma omp parallel for schedule(dynamic) if (rows > 1)
    for (int64_t row = 0; row < rows; row++)
        out[row] = gumbel_argmax_row(logits + row * vocab, vocab, temperature[row], Noise(keys + 4 * row));
}

// p against q: result i is of rows p_rows[i] and q_rows[i].

void paceline_residual_mass(
    int64_t count, int64_t vocab, const float* p, const float* q, const int64_t* p_rows, const int64_t* q_rows,
    const double* scale, double* out
) {
#pragma omp parallel for schedule(static) if (count > 1)
    for (int64_t i = 0; i < count; i++)
        out[i] = residual_mass_row(p + p_rows[i] * vocab, q + q_rows[i] * vocab, vocab, scale[i]);
}

void paceline_overlap(
    int64_t count, int64_t vocab, const float* p, const float* q, const int64_t* p_rows, const int64_t* q_rows,
    double* out
) {
#pragma omp parallel for schedule(static) if (count > 1)
    for (int64_t i = 0; i < count; i++)
        out[i] = overlap_row(p + p_rows[i] * vocab, q + q_rows[i] * vocab, vocab);
}

void paceline_residual(
    int64_t count, int64_t vocab, const float* p, const float* q, const int64_t* p_rows, const int64_t* q_rows,
    const double* scale, float* out
) {
#pragma omp parallel for schedule(static) if (count > 1)
    for (int64_t i = 0; i < count; i++) {
        const float* other = q_rows[i] < 0 ? nullptr : q + q_rows[i] * vocab;
        residual_row(p + p_rows[i] * vocab, other, vocab, scale[i], out + i * vocab);
    }
}

void paceline_draw(int64_t rows, int64_t vocab, const float* weights, const double* u, int64_t* out) {
#pragma omp parallel for schedule(static) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        static thread_local std::vector<double> sums;
        out[row] = draw_row(weights + row * vocab, vocab, u[row], sums);
    }
}

}
