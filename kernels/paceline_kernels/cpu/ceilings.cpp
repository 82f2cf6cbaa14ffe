// The most that this machine can do: how fast memory can be read, and how fast numbers in registers can be multiplied.
// Kernels are measured against both.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "amx.h"
#include "vec.h"

namespace {

// How many registers can be summed up at once: enough to hide what a sum waits for, and no more than there are.
#if defined(__AVX512F__)
constexpr int SUMS = 16;
#else
constexpr int SUMS = 12;
#endif

uint32_t folded(Bits x) {
    uint32_t all = 0;
    for (int lane = 0; lane < REGISTER_LANES; ++lane) all ^= x[lane];
    return all;
}

// ---- Reading ----

constexpr int64_t LINE = 64;

// `lines` lines of each of STREAMS pieces that lie one behind the other, all of them side by side.
template <int STREAMS>
Bits read_pieces(const char* from, int64_t lines, int64_t ahead) {
    Bits seen[STREAMS] = {};
    const int64_t piece = lines * LINE;
    for (int64_t i = 0; i < piece; i += LINE) {
#pragma GCC unroll 8
        for (int stream = 0; stream < STREAMS; ++stream) {
            const char* const at = from + stream * piece + i;
            if (ahead) __builtin_prefetch(at + ahead);
#pragma GCC unroll 4
            for (int64_t part = 0; part < LINE; part += REGISTER_BYTES) seen[stream] ^= (Bits)load_register(at + part);
        }
    }
    for (int stream = 1; stream < STREAMS; ++stream) seen[0] ^= seen[stream];
    return seen[0];
}

// `lines` lines in as many pieces, and those that are left over behind them.
template <int STREAMS>
uint32_t read_part(const char* from, int64_t lines, int64_t ahead) {
    const int64_t piece = lines / STREAMS;
    const char* const rest = from + piece * STREAMS * LINE;
    return folded(read_pieces<STREAMS>(from, piece, ahead) ^ read_pieces<1>(rest, lines % STREAMS, ahead));
}

// ---- Multiplying ----

// Tells the compiler that x may have changed, so that it cannot compute products, or equal sums, once and for all.
inline void refresh(Register& x) {
#if defined(__x86_64__)
    asm volatile("" : "+v"(x));
#else
    asm volatile("" : "+m"(x));
#endif
}

// Calls step(sum, a, b) for many independent sums; the result is there to be used, or nothing would be computed.
template <class Step>
uint32_t repeat(int64_t rounds, const Step& step) {
    Register sums[SUMS] = {}, a = {}, b = {};
    refresh(b);
    for (Register& sum : sums) refresh(sum);
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
        for (int i = 0; i < SUMS; ++i) {
            refresh(a);
            sums[i] = step(sums[i], a, b);
        }
    }
    uint32_t all = 0;
    for (const Register& sum : sums) all ^= folded((Bits)sum);
    return all;
}

constexpr int64_t OPERATIONS = 2 * SUMS * REGISTER_BYTES;  // per round and byte of an element: a product and its sum

// Each returns how many operations a thread has done.

int64_t multiply_floats(int64_t rounds, uint32_t& seen) {
    seen = repeat(rounds, [](Register sum, Register a, Register b) { return multiply_add(a, b, sum); });
    return rounds * OPERATIONS / 4;
}

int64_t multiply_halves(int64_t rounds, uint32_t& seen) {
    if constexpr (HALVES_WIDE) return multiply_floats(rounds, seen);
    seen = repeat(rounds, [](Register sum, Register a, Register b) { return multiply_add_pairs((Bits)a, (Bits)b, sum); });
    return rounds * OPERATIONS / 2;
}

int64_t multiply_bytes(int64_t rounds, uint32_t& seen) {
    seen = repeat(rounds, [](Register sum, Register a, Register b) {
        if constexpr (BYTES_WIDE) return (Register)multiply_add_shorts((Bits)a, (Bits)b, (Integers)sum);
        return (Register)multiply_add_bytes((Bits)a, (Bits)b, (Integers)sum);
    });
    return rounds * OPERATIONS / (BYTES_WIDE ? 2 : 1);
}

#ifdef TILES
template <bool HALVES>
int64_t multiply_tiles(int64_t rounds) {
    const Tiles tiles;
    alignas(64) static const char zeros[16 * 64] = {};
    clear_tile<0>();
    clear_tile<1>();
    clear_tile<2>();
    clear_tile<3>();
    load_tile<4>(zeros, 64);
    load_tile<5>(zeros, 64);
    load_tile<6>(zeros, 64);
    load_tile<7>(zeros, 64);
    for (int64_t round = 0; round < rounds; ++round) {
        if constexpr (HALVES) {
            multiply_bfloat16_tiles<0, 4, 6>();
            multiply_bfloat16_tiles<1, 4, 7>();
            multiply_bfloat16_tiles<2, 5, 6>();
            multiply_bfloat16_tiles<3, 5, 7>();
        } else {
            multiply_int8_tiles<0, 4, 6>();
            multiply_int8_tiles<1, 4, 7>();
            multiply_int8_tiles<2, 5, 6>();
            multiply_int8_tiles<3, 5, 7>();
        }
    }
    return rounds * 4 * 16 * 16 * (HALVES ? 32 : 64) * 2;
}
#endif

int64_t multiply(int kind, int64_t rounds, uint32_t& seen) {
    if (kind == 0) return multiply_floats(rounds, seen);
#ifdef TILES
    if (has_tiles()) return kind == 1 ? multiply_tiles<true>(rounds) : multiply_tiles<false>(rounds);
#endif
    return kind == 1 ? multiply_halves(rounds, seen) : multiply_bytes(rounds, seen);
}

}  // namespace

extern "C" {

// Which instructions the decoder multiplies by. The string lives forever.
const char* paceline_family() {
    if (has_tiles()) return EMULATED_TILES ? "AMX, emulated" : "AMX";
#if defined(__AVX512F__)
    return HALVES_WIDE ? "AVX512" : "AVX512-BF16";
#elif defined(__AVX2__)
    return "AVX2";
#else
    return "plain";
#endif
}

// Read every whole line of 64 bytes once. Each thread walks through its own part, in `streams` (1, 4 or 8) places at
// once, and asks for lines `ahead` bytes before it needs them, or for none if 0; with `shared`, threads take turns at
// parts of 1 MiB instead. The result is there to be used, or nothing would be read.
uint32_t paceline_read(const char* data, int64_t bytes, int streams, int64_t ahead, bool shared, int64_t num_threads) {
    const auto part = streams == 8 ? read_part<8> : streams == 4 ? read_part<4> : read_part<1>;
    const int64_t lines = bytes / LINE;
    const int64_t most = shared ? (1 << 20) / LINE : std::max<int64_t>(1, (lines + num_threads - 1) / num_threads);
    uint32_t seen = 0;
    const auto read = [&](int64_t begin) { return part(data + begin * LINE, std::min(most, lines - begin), ahead); };
#pragma omp parallel num_threads(num_threads) reduction(^ : seen)
    if (shared) {
#pragma omp for schedule(dynamic, 1)
        for (int64_t begin = 0; begin < lines; begin += most) seen ^= read(begin);
    } else {
#pragma omp for schedule(static, 1)
        for (int64_t begin = 0; begin < lines; begin += most) seen ^= read(begin);
    }
    return seen;
}

// Multiply and add numbers of kind 0, float, 1, bfloat16, or 2, 8 bits, by the fastest instructions there are for them,
// which for bfloat16 may be those for floats; 8 bits without VNNI as the decoder does it. Returns how many operations that
// was, a product and its sum being two.
int64_t paceline_multiply(int kind, int64_t rounds, int64_t num_threads) {
    int64_t operations = 0;
    uint32_t all = 0;
#pragma omp parallel num_threads(num_threads) reduction(+ : operations) reduction(^ : all)
    {
        uint32_t seen = 0;
        operations += multiply(kind, rounds, seen);
        all ^= seen;
    }
    volatile uint32_t used = all;
    (void)used;
    return operations;
}
}
