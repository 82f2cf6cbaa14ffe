// The operations of sampling on rows of float32 logits; paceline_kernels/sampling.py says what each computes.
//
// Rows are shared between threads and one thread computes a row, so that no sum depends on their number. A row of a
// large vocabulary fits the L2 cache: reading it twice costs little more than reading it once.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "vec.h"

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr int64_t ROW_CHUNK = 4096;  // values of a row that are looked at, or added up, together

float highest_of(const float* x, int64_t n) {
    Floats best[4] = {all(-INF), all(-INF), all(-INF), all(-INF)};
    for (int64_t v = 0; v < n; v += 4 * LANES)
        for (int part = 0; part < 4; part++) {
            const int64_t at = v + part * LANES;
            if (at >= n) break;
            const Floats some = load(x + at, n - at, -INF);
            best[part] = larger(some, best[part]);
        }
    for (int part = 1; part < 4; part++) best[0] = larger(best[part], best[0]);
    return maximum(best[0]);
}

int64_t argmax_of(const float* x, int64_t n) {
    float best = -INF;
    int64_t chunk = 0;
    for (int64_t start = 0; start < n; start += ROW_CHUNK) {
        const float here = highest_of(x + start, std::min(ROW_CHUNK, n - start));
        if (here > best) best = here, chunk = start;
    }
    for (int64_t v = chunk; v < std::min(chunk + ROW_CHUNK, n); v++)
        if (x[v] == best) return v;
    return 0;  // nothing but NaN
}

// (logit - highest) / temperature: 0 at the maximum, so that no temperature overflows there.
struct Scale {
    float highest, inverse;

    Scale(float highest, float temperature) : highest(highest), inverse(std::min(1 / temperature, FLT_MAX)) {}

    Floats operator()(Floats logits) const { return (logits - highest) * inverse; }
};

// --- truncate ---

// Masses are integers in units of 2^-40 of the largest weight, 1. Their sums are exact, so they depend neither on the
// order of the vocabulary nor on how it is cut into vectors.
constexpr float UNIT = 0x1p40f;

struct Quanta {
    Longs first, second;

    explicit Quanta(Floats weights) : first(longs(low(weights * UNIT))), second(longs(high(weights * UNIT))) {}
};

struct Mass {
    Longs first{}, second{};

    void add(const Quanta& quanta) { first += quanta.first, second += quanta.second; }

    void add(const Quanta& quanta, Ints mask) { add_where(mask, first, quanta.first, second, quanta.second); }

    int64_t total() const {
        int64_t sum = 0;
        for (int lane = 0; lane < 8; lane++) sum += first[lane] + second[lane];
        return sum;
    }
};

int64_t mass_of(float weight) { return (int64_t)(weight * UNIT); }

// What the steps of truncate_ have left of a row.
struct Kept {
    Scale scale;
    float smallest_x = -INF;         // min_p
    float centre = 0, radius = INF;  // typical_p, in units of the logits
    float smallest = -FLT_MAX;       // top_k and top_p; -inf is never kept

    Ints operator()(Floats logits) const {
        const Floats distance = logits - centre;
        return (logits >= smallest) & (scale(logits) >= smallest_x) & (distance <= radius) & (distance >= -radius);
    }
};

// What a step ranks tokens by, and what it counts of each.
struct ByRank {
    Floats key(Floats logits) const { return logits; }
    Floats weight(Floats) const { return all(1); }
};

struct ByProbability {
    Scale scale;
    Floats key(Floats logits) const { return logits; }
    Floats weight(Floats logits) const { return exp(scale(logits)); }
};

struct BySurprise {
    Scale scale;
    float centre;
    Floats key(Floats logits) const {
        const Floats distance = logits - centre;
        return distance > 0.0f ? -distance : distance;
    }
    Floats weight(Floats logits) const { return exp(scale(logits)); }
};

struct Items {
    Floats keys, weights;  // -inf and 0 where there is none
};

// What is left of a row, as a step sees it.
template <class Rule>
struct Tokens {
    const float* row;
    int64_t count;
    Kept kept;
    Rule rule;

    Floats logits(int64_t v) const { return load(row + v, count - v, -INF); }

    Items operator()(int64_t v) const {
        const Floats some = logits(v);
        const Ints mask = kept(some);
        return {mask ? rule.key(some) : all(-INF), where(mask, rule.weight(some))};
    }
};

struct Bracket {
    float least, most;
};

enum class Side { ABOVE, WITHIN, BELOW };

// The items on one side of a bracket.
struct Part {
    Side side;
    Bracket bracket;

    Ints operator()(Floats keys) const {
        if (side == Side::ABOVE) return keys > bracket.most;
        if (side == Side::BELOW) return (keys < bracket.least) & (keys > -INF);
        return (keys >= bracket.least) & (keys <= bracket.most);
    }
};

constexpr Bracket ALL = {-FLT_MAX, INF};

// Running masses are integers: they reach a share when they reach the next integer. A share that float32 rounds to 0
// still asks for a token.
int64_t share_of(int64_t total, float share) {
    return std::max((int64_t)std::ceil((double)share * (double)total), (int64_t)1);
}

// Finds the largest key t such that the keys >= t have at least the mass asked for. Each round estimates from a sample
// where t lies, and keeps the items on its side; the first round reads the row, later ones what was kept.
class Selection {
  public:
    // The mass asked for is a share of the whole.
    template <class Rule>
    float reaching_share(const Tokens<Rule>& tokens, float share) {
        const Bracket bracket = estimate(tokens, tokens.count, share, MARGIN);
        const Masses masses = weigh(tokens, tokens.count, bracket);
        int64_t target = share_of(masses.total, share), mass;
        collect(tokens, choose(bracket, masses, target, mass));
        return finish(target, mass);
    }

    // The same, faster where few tokens are left.
    template <class Rule>
    float reaching_share_of_few(const Tokens<Rule>& tokens, float share) {
        collect(tokens, {Side::WITHIN, ALL});
        const int64_t total = weigh(*this, count, ALL).total;
        return finish(share_of(total, share), total);
    }

    // The k-th largest logit; -FLT_MAX if there are fewer.
    float largest(Tokens<ByRank> tokens, int64_t k) {
        tokens.kept.smallest = largest_of_groups(tokens, k);
        collect(tokens, {Side::WITHIN, ALL});
        return finish(k * mass_of(1), count * mass_of(1));
    }

  private:
    static constexpr int SAMPLE = 128;
    static constexpr int MARGIN = 8;  // places in the sample: about 1.5 standard deviations of where t may be
    static constexpr int64_t GROUP = 16 * LANES;

    struct Pair {
        float key, weight;
    };

    struct Masses {
        int64_t total, from_least, above_most;
    };

    std::vector<float> keys, weights;  // what was kept, with room for a vector more
    int64_t count = 0;

    Items operator()(int64_t i) const { return {load(&keys[i], count - i, -INF), load(&weights[i], count - i, 0)}; }

    void reserve(int64_t size) {
        if ((int64_t)keys.size() >= size + LANES) return;
        keys.resize(size + LANES);
        weights.resize(size + LANES);
    }

    // The later rounds: `mass` is that of what was kept.
    float finish(int64_t target, int64_t mass) {
        while (count > SAMPLE) {
            const Bracket pivot = estimate(*this, count, (double)target / (double)mass, 0);
            const Masses masses = weigh(*this, count, pivot);
            if (masses.above_most < target && target <= masses.from_least) return pivot.least;
            narrow(choose(pivot, masses, target, mass));  // without the pivot, so every round drops something
        }
        if (count == 0) return -FLT_MAX;
        Pair pairs[SAMPLE];
        for (int64_t i = 0; i < count; i++) pairs[i] = {keys[i], weights[i]};
        const int place = reaching(pairs, (int)count, (double)target);
        return place < count ? pairs[place].key : -FLT_MAX;
    }

    // A bound from below: the largest logits of k groups are k logits, so that the k-th largest of all is no less than
    // the least of them.
    float largest_of_groups(const Tokens<ByRank>& tokens, int64_t k) {
        reserve(tokens.count);
        count = 0;
        for (int64_t start = 0; start < tokens.count; start += GROUP) {
            Floats best = all(-INF);
            for (int64_t v = start; v < std::min(start + GROUP, tokens.count); v += LANES) {
                const Floats some = tokens(v).keys;
                best = larger(some, best);
            }
            count += compress(&keys[count], best, best > -INF);
        }
        if (count < k) return -FLT_MAX;
        std::fill_n(weights.begin(), count, 1.0f);
        return finish(k * mass_of(1), count * mass_of(1));
    }

    // Around the key where the running mass of a sample reaches the share, `margin` places to either side.
    template <class Source>
    static Bracket estimate(const Source& source, int64_t n, double share, int margin) {
        Pair pairs[SAMPLE];
        int size = 0;
        const int64_t vectors = (n + LANES - 1) / LANES, step = (vectors * LANES + SAMPLE - 1) / SAMPLE;
        double mass = 0;
        for (int64_t at = 0; at < vectors; at += step) {
            const Items items = source(at * LANES);
            for (int lane = 0; lane < LANES; lane++) {
                if (items.keys[lane] == -INF) continue;
                pairs[size++] = {items.keys[lane], items.weights[lane]};
                mass += (double)mass_of(items.weights[lane]);
            }
        }
        if (size == 0) return ALL;
        const int place = std::min(reaching(pairs, size, share * mass), size - 1);
        return {pairs[std::min(place + margin, size - 1)].key, place < margin ? INF : pairs[place - margin].key};
    }

    // Sorts pairs by descending key; the place where their running mass first reaches the target, `size` if nowhere.
    static int reaching(Pair* pairs, int size, double target) {
        std::sort(pairs, pairs + size, [](const Pair& a, const Pair& b) { return a.key > b.key; });
        int64_t mass = 0;
        for (int place = 0; place < size; place++)
            if ((double)(mass += mass_of(pairs[place].weight)) >= target) return place;
        return size;
    }

    template <class Source>
    static Masses weigh(const Source& source, int64_t n, Bracket bracket) {
        Mass total, from_least, above_most;
        for (int64_t i = 0; i < n; i += LANES) {
            const Items items = source(i);
            const Quanta quanta(items.weights);
            total.add(quanta);
            from_least.add(quanta, items.keys >= bracket.least);
            above_most.add(quanta, items.keys > bracket.most);
        }
        return {total.total(), from_least.total(), above_most.total()};
    }

    // The part where the running mass reaches the target. Sets `mass` to that of the part, and leaves in `target` what
    // is asked of it alone.
    static Part choose(Bracket bracket, const Masses& masses, int64_t& target, int64_t& mass) {
        if (masses.above_most >= target) {
            mass = masses.above_most;
            return {Side::ABOVE, bracket};
        }
        if (masses.from_least >= target) {
            mass = masses.from_least - masses.above_most;
            target -= masses.above_most;
            return {Side::WITHIN, bracket};
        }
        mass = masses.total - masses.from_least;
        target -= masses.from_least;
        return {Side::BELOW, bracket};
    }

    // Fills keys and weights with a part of the row.
    template <class Rule>
    void collect(const Tokens<Rule>& source, Part part) {
        const Tokens<Rule> tokens = source;  // a copy that no store below can change
        reserve(tokens.count);
        float* const to = keys.data();
        int64_t written = 0;
        for (int64_t v = 0; v < tokens.count; v += LANES) {
            const Ints mask = part(tokens(v).keys);
            if (any(mask)) written += compress(to + written, tokens.logits(v), mask);
        }
        count = written;
        for (int64_t i = 0; i < count; i += LANES) {
            const Floats logits = load(to + i, count - i, -INF);
            store(&weights[i], tokens.rule.weight(logits), count - i);
            store(to + i, tokens.rule.key(logits), count - i);
        }
    }

    // Keeps a part of keys and weights; writes no further than it has read.
    void narrow(Part part) {
        int64_t written = 0;
        for (int64_t i = 0; i < count; i += LANES) {
            const Items items = (*this)(i);
            const Ints mask = part(items.keys);
            compress(&keys[written], items.keys, mask);
            written += compress(&weights[written], items.weights, mask);
        }
        count = written;
    }
};

struct Limits {
    float temperature, top_p, min_p, typical_p;
    int64_t top_k;
};

// Locally typical sampling. |-log p - entropy| is |x - E[x]|: in units of the logits, how far from where E[x] lies.
void keep_typical(const float* row, int64_t vocab, const Limits& limits, Kept& kept, Selection& selection) {
    Mass total, moment;
    for (int64_t v = 0; v < vocab; v += LANES) {
        const Floats logits = load(row + v, vocab - v, -INF), x = kept.scale(logits);
        const Floats weights = where(kept(logits), exp(x));
        total.add(Quanta(weights));
        moment.add(Quanta(weights * where(weights > 0.0f, x)));  // not 0 * -inf
    }
    const double mean = (double)moment.total() / (double)total.total();
    const float centre = (float)(kept.scale.highest + mean * limits.temperature);
    const Tokens<BySurprise> tokens{row, vocab, kept, {kept.scale, centre}};
    const float radius = -selection.reaching_share(tokens, limits.typical_p);
    kept.centre = centre, kept.radius = radius;
}

void keep_top_k(const float* row, int64_t vocab, const Limits& limits, Kept& kept, Selection& selection) {
    kept.smallest = selection.largest({row, vocab, kept, {}}, limits.top_k);
}

void keep_top_p(const float* row, int64_t vocab, const Limits& limits, Kept& kept, Selection& selection) {
    const Tokens<ByProbability> tokens{row, vocab, kept, {kept.scale}};
    const bool few = limits.top_k > 0 && limits.top_k < vocab;
    kept.smallest = few ? selection.reaching_share_of_few(tokens, limits.top_p) : selection.reaching_share(tokens, limits.top_p);
}

void truncate_row(float* row, int64_t vocab, const Limits& limits, Selection& selection) {
    const bool typical = limits.typical_p < 1, top_k = limits.top_k > 0 && limits.top_k < vocab, top_p = limits.top_p < 1;
    if (!(typical || top_k || top_p || limits.min_p > 0)) return;
    Kept kept{Scale(highest_of(row, vocab), limits.temperature)};
    if (kept.scale.highest == -INF) return;
    kept.smallest_x = (float)std::log((double)limits.min_p);
    if (typical) keep_typical(row, vocab, limits, kept, selection);
    if (top_k) keep_top_k(row, vocab, limits, kept, selection);
    if (top_p) keep_top_p(row, vocab, limits, kept, selection);
    for (int64_t v = 0; v < vocab; v += LANES) {
        const Floats logits = load(row + v, vocab - v, -INF);
        store(row + v, kept(logits) ? logits : all(-INF), vocab - v);
    }
}

// --- softmax ---

void softmax_row(float* row, int64_t vocab, float temperature) {
    const Scale scale(highest_of(row, vocab), temperature);
    Sum sum;
    for (int64_t v = 0; v < vocab; v += LANES) {
        const Floats weights = exp(scale(load(row + v, vocab - v, -INF)));
        sum.add(weights);
        store(row + v, weights, vocab - v);
    }
    const double total = sum.total();
    if (!(total >= 1)) {  // the largest weight is 1, unless the row is no distribution
        std::fill_n(row, vocab, 0.0f);
        return;
    }
    const float inverse = (float)(1 / total);
    for (int64_t v = 0; v < vocab; v += LANES)
        store(row + v, load(row + v, vocab - v, 0) * inverse, vocab - v);
}

// --- gumbel_argmax ---

constexpr int64_t BLOCK = 64;  // tokens whose noise is made at once: 16 counters of 4 words each
constexpr double MOST_NOISE = 22.9;  // G at the smallest w, 2^-33, is 22.87
constexpr float SLACK = 1e-3f;       // more than the rounding of a bound that matters

struct Noise {
    uint32_t seed_low, seed_high, position, choice;

    explicit Noise(const int64_t* key)
        : seed_low(key[0]), seed_high(key[1]), position(key[2]), choice(key[3]) {}

    // Philox4x32-10 for the tokens first .. first + 63; `first` is a multiple of 4.
    void words(int64_t first, uint32_t* out) const {
        for (int half = 0; half < 2; half++) {
            // 32-bit words in lanes of 64 bits, whose upper halves are never looked at.
            Wide a = Wide{0, 1, 2, 3, 4, 5, 6, 7} + (uint64_t)(first / 4 + 8 * half);
            Wide b = Wide{} + (uint64_t)position, c = Wide{} + (uint64_t)choice, d = Wide{} + (uint64_t)0x50414345;
            uint32_t left = seed_low, right = seed_high;
            for (int round = 0; round < 10; round++) {
                const Wide x = ::multiply(a, 0xD2511F53), y = ::multiply(c, 0xCD9E8D57);
                a = (y >> 32) ^ b ^ (uint64_t)left, b = y;
                c = (x >> 32) ^ d ^ (uint64_t)right, d = x;
                left += 0x9E3779B9, right += 0xBB67AE85;
            }
            uint64_t pairs[16];
            interleave(pairs, (a & 0xFFFFFFFFu) | (b << 32), (c & 0xFFFFFFFFu) | (d << 32));
            std::memcpy(out + 32 * half, pairs, sizeof pairs);
        }
    }
};

double gumbel(uint32_t word) {
    const double w = std::min((word + 0.5) * 0x1p-32, 1 - 0x1p-24);
    return -std::log(-std::log1p(-w));
}

// At least G - 32 ln 2, for 16 words: G <= -log w, and the logarithm's chord lies below it, which is what the bits of a
// float count, exponent and mantissa together.
Floats noise_bound(Words words) {
    const Ints bits = (Ints)__builtin_convertvector(words, Floats);
    return (127.0f - __builtin_convertvector(bits, Floats) * 0x1p-23f) * (float)M_LN2;
}

int64_t gumbel_argmax_row(const float* row, int64_t vocab, float temperature, const Noise& noise) {
    int64_t winner = argmax_of(row, vocab);
    const float highest = row[winner];
    if (highest == -INF) return winner;
    const Scale scale(highest, temperature);
    const auto score = [&](int64_t v, uint32_t word) {
        return ((double)row[v] - (double)highest) / (double)temperature + gumbel(word);
    };
    uint32_t words[BLOCK];
    noise.words(winner / BLOCK * BLOCK, words);
    double best = score(winner, words[winner % BLOCK]);
    for (int64_t first = 0; first < vocab; first += BLOCK) {
        Floats x[4];
        Ints possible{};
        for (int part = 0; part < 4; part++) {
            const int64_t left = std::max(vocab - first - part * LANES, (int64_t)0);
            x[part] = scale(load(row + first + part * LANES, left, -INF));
            possible |= x[part] > (float)(best - MOST_NOISE) - SLACK;
        }
        if (!any(possible)) continue;
        noise.words(first, words);
        const float limit = (float)(best - 32 * M_LN2) - SLACK;
        for (int part = 0; part < 4; part++) {
            Words some;
            std::memcpy(&some, words + part * LANES, sizeof some);
            const Ints close = x[part] + noise_bound(some) > limit;
            if (!any(close)) continue;
            for (int lane = 0; lane < LANES; lane++) {
                if (!close[lane]) continue;
                const int64_t v = first + part * LANES + lane;
                const double here = score(v, words[part * LANES + lane]);
                if (here > best || (here == best && v < winner)) best = here, winner = v;
            }
        }
    }
    return winner;
}

// --- sums and draws ---

inline double residual_mass_row(const float* p, const float* q, int64_t vocab, double scale) {
    Sum sum;
    for (int64_t v = 0; v < vocab; v += LANES) {
        const Floats ps = load(p + v, vocab - v, 0), qs = load(q + v, vocab - v, 0);
        const Doubles first = scale * doubles(low(ps)) - doubles(low(qs));
        const Doubles second = scale * doubles(high(ps)) - doubles(high(qs));
        sum.add(first > 0.0 ? first : Doubles{}, second > 0.0 ? second : Doubles{});
    }
    return sum.total();
}

inline double overlap_row(const float* p, const float* q, int64_t vocab) {
    Sum sum;
    for (int64_t v = 0; v < vocab; v += LANES) {
        const Floats ps = load(p + v, vocab - v, 0), qs = load(q + v, vocab - v, 0);
        sum.add(ps < qs ? ps : qs);
    }
    return sum.total();
}

// max(scale * p - q, 0), or p itself where there is no q or nothing is left.
inline void residual_row(const float* p, const float* q, int64_t vocab, double scale, float* out) {
    float most = 0;
    if (q != nullptr) {
        Floats highest{};
        const Floats scales = all(static_cast<float>(scale));
        for (int64_t v = 0; v < vocab; v += LANES) {
            const Floats left = scales * load(p + v, vocab - v, 0) - load(q + v, vocab - v, 0);
            const Floats kept = larger(left, Floats{});
            highest = larger(kept, highest);
            store(out + v, kept, vocab - v);
        }
        for (int lane = 0; lane < LANES; lane++) most = std::max(most, highest[lane]);
    }
    if (!(most > 0)) std::copy(p, p + vocab, out);
}

double sum_of(const float* x, int64_t n) {
    Sum sum;
    for (int64_t v = 0; v < n; v += LANES) sum.add(load(x + v, n - v, 0));
    return sum.total();
}

// The last token below `end` with a weight; 0 if there is none.
int64_t last_positive(const float* weights, int64_t end) {
    for (int64_t v = end - 1; v > 0; v--)
        if (weights[v] > 0) return v;
    return 0;
}

// Cumulative weights are sums of whole chunks, and inside a chunk of single tokens.
int64_t draw_row(const float* weights, int64_t vocab, double u, std::vector<double>& sums) {
    sums.clear();
    double total = 0;
    for (int64_t start = 0; start < vocab; start += ROW_CHUNK) {
        sums.push_back(sum_of(weights + start, std::min(ROW_CHUNK, vocab - start)));
        total += sums.back();
    }
    const double target = u * total;
    double mass = 0;
    for (int64_t start = 0; start < vocab; start += ROW_CHUNK) {
        const double before = mass;
        mass += sums[start / ROW_CHUNK];
        if (!(mass > target)) continue;
        const int64_t end = std::min(start + ROW_CHUNK, vocab);
        double running = before;
        for (int64_t v = start; v < end; v++)
            if ((running += weights[v]) > target) return v;
        return last_positive(weights, end);  // the chunk's sum exceeds the target, but not token by token
    }
    return last_positive(weights, vocab);
}

}  // namespace
