// Vectors of one cache line, as the compiler's own vector types: they become whatever the machine has, and every
// operation on a lane is the same operation at every place, so results do not depend on where a value stands.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "amx.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#if !defined(INTEL)
#define INTEL 0  // whether the CPU is one of Intel's: what instructions it has does not tell how it does them
#endif

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));  // as a mask: 0 or -1 in each lane
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int64_t Longs __attribute__((vector_size(64)));
typedef uint64_t Wide __attribute__((vector_size(64)));
typedef double Doubles __attribute__((vector_size(64)));
typedef float Half __attribute__((vector_size(32)));

constexpr int LANES = 16;

inline Floats all(float x) { return x - Floats{}; }  // a sum would turn -0 into 0, which takes an instruction

// The next `left` elements, at most LANES; lanes beyond them hold `fill`.
inline Floats load(const float* from, int64_t left, float fill) {
    Floats x;
    if (left >= LANES) {
        std::memcpy(&x, from, sizeof x);
    } else {
        x = all(fill);
        std::memcpy(&x, from, left * sizeof(float));
    }
    return x;
}

inline void store(float* to, Floats x, int64_t left) {
    if (left >= LANES)
        std::memcpy(to, &x, sizeof x);
    else
        std::memcpy(to, &x, left * sizeof(float));
}

// The compiler's own conversions between lanes of different widths go through memory or through narrower vectors.

inline Half low(Floats x) {
#if defined(__AVX512F__)
    return (Half)_mm512_castps512_ps256((__m512)x);
#else
    Half half;
    std::memcpy(&half, &x, sizeof half);
    return half;
#endif
}

inline Half high(Floats x) {
#if defined(__AVX512DQ__)
    return (Half)_mm512_extractf32x8_ps((__m512)x, 1);
#else
    Half half;
    std::memcpy(&half, reinterpret_cast<const char*>(&x) + sizeof half, sizeof half);
    return half;
#endif
}

inline Doubles doubles(Half x) {
#if defined(__AVX512F__)
    return (Doubles)_mm512_cvtps_pd((__m256)x);
#else
    return __builtin_convertvector(x, Doubles);
#endif
}

// Towards zero.
inline Longs longs(Half x) {
#if defined(__AVX512DQ__)
    return (Longs)_mm512_cvttps_epi64((__m256)x);
#else
    return __builtin_convertvector(x, Longs);
#endif
}

// x where the mask is set, else 0.
inline Floats where(Ints mask, Floats x) { return (Floats)((Ints)x & mask); }

inline bool any(Ints mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    int32_t seen = 0;
    for (int lane = 0; lane < LANES; lane++) seen |= mask[lane];
    return seen != 0;
#endif
}

inline int32_t total(Ints x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
#endif
}

// Write the lanes set in the mask one after the other; returns how many. `to` has room for LANES.
inline int compress(float* to, Floats x, Ints mask) {
#if defined(__AVX512F__)
    const __mmask16 lanes = _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps(lanes, (__m512)x));
    return __builtin_popcount(lanes);
#else
    int count = 0;
    for (int lane = 0; lane < LANES; lane++) {
        to[count] = x[lane];
        count -= mask[lane];
    }
    return count;
#endif
}

// a += x and b += y where the mask of 16 lanes, 8 for each, is set.
inline void add_where(Ints mask, Longs& a, Longs x, Longs& b, Longs y) {
#if defined(__AVX512F__)
    const __mmask16 lanes = _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
    a = (Longs)_mm512_mask_add_epi64((__m512i)a, (__mmask8)lanes, (__m512i)a, (__m512i)x);
    b = (Longs)_mm512_mask_add_epi64((__m512i)b, (__mmask8)(lanes >> 8), (__m512i)b, (__m512i)y);
#else
    for (int lane = 0; lane < 8; lane++) {
        a[lane] += x[lane] & (int64_t)mask[lane];
        b[lane] += y[lane] & (int64_t)mask[lane + 8];
    }
#endif
}

// The low 32 bits of each lane times `factor`, all 64 bits of it; what the lanes hold above them is ignored.
inline Wide multiply(Wide x, uint32_t factor) {
#if defined(__AVX512F__)
    return (Wide)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(factor));
#else
    return (x & 0xFFFFFFFFu) * (uint64_t)factor;
#endif
}

// a[0], b[0], a[1], b[1], ... into `to`, 16 elements.
inline void interleave(uint64_t* to, Wide a, Wide b) {
#if defined(__AVX512F__)
    const __m512i first = _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0), second = _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi64((__m512i)a, first, (__m512i)b));
    _mm512_storeu_si512(to + 8, _mm512_permutex2var_epi64((__m512i)a, second, (__m512i)b));
#else
    for (int lane = 0; lane < 8; lane++) {
        to[2 * lane] = a[lane];
        to[2 * lane + 1] = b[lane];
    }
#endif
}

// ---- Registers ----

// What a register holds: some lanes of a vector. Compilers keep wider ones in memory, at many times the cost, so that
// products are written for registers.
#if defined(__AVX512F__)
constexpr int REGISTER_BYTES = 64;
#elif defined(__AVX2__)
constexpr int REGISTER_BYTES = 32;
#else
constexpr int REGISTER_BYTES = 16;
#endif
constexpr int REGISTER_LANES = REGISTER_BYTES / sizeof(float);
// Whether what is narrow has to be widened before it is multiplied. Then weights are, for some rows at a time; and rows,
// for which it would be done far more often, are kept wide. Cores of Intel's could multiply pairs of bfloat16 as they are,
// but do products of floats at twice the rate. What may go through a matrix unit stays as it is.
constexpr bool BYTES_WIDE = REGISTER_BYTES < 64 && !EMULATED_TILES;
#if defined(TILES) || (defined(__AVX512BF16__) && !INTEL)
constexpr bool HALVES_WIDE = false;
#else
constexpr bool HALVES_WIDE = true;
#endif
typedef float Register __attribute__((vector_size(REGISTER_BYTES)));
typedef int32_t Integers __attribute__((vector_size(REGISTER_BYTES)));
typedef uint32_t Bits __attribute__((vector_size(REGISTER_BYTES)));

inline Register load_register(const void* from) {
    Register x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

// The same, aligned, of what is read once: a non-temporal load, after which CPUs of AMD do not keep the line in the
// third cache. Elsewhere it is a load like others. It stays where it is written; GCC would place it badly.
inline Register load_once(const void* from) {
#if defined(__AVX2__)
    Register x;
    asm volatile("vmovntdqa %1, %0" : "=v"(x) : "m"(*(const Register*)from));
    return x;
#else
    return load_register(from);
#endif
}

inline void store_register(float* to, Register x) { std::memcpy(to, &x, sizeof x); }

// The same, which is in a register from here on. Where there are 16 of them, compilers load ahead of what they compute and
// then have to put sums into memory, again and again; so what is loaded and what is added up stay in their order.
template <class Vector>
inline Vector kept(Vector x) {
#if defined(__x86_64__) && !defined(__AVX512F__)
    asm volatile("" : "+x"(x));
#endif
    return x;
}

// The same of what several sums need: compilers would load it again for each.
template <class Vector>
inline Vector kept_for_all(Vector x) {
#if defined(__AVX512F__)
    asm volatile("" : "+v"(x));
    return x;
#else
    return kept(x);
#endif
}

// One value in all lanes. (Of a float, a sum would turn -0 into 0, which takes an instruction.)
inline Register broadcast(float x) { return x - Register{}; }
inline Integers broadcast(int32_t x) { return Integers{} + x; }

// The 4 bytes at an address in all lanes: a pair of bfloat16, or four 8-bit integers.
inline Bits broadcast_word(const void* from) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    float x;  // which goes from memory to all lanes, where an integer would take a detour
    std::memcpy(&x, from, sizeof x);
    return (Bits)_mm256_set1_ps(x);
#else
    uint32_t x;
    std::memcpy(&x, from, sizeof x);
    return Bits{} + x;
#endif
}

// a * b + c, rounded once where x86 can.
inline Register multiply_add(Register a, Register b, Register c) {
#if defined(__AVX512F__)
    return (Register)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && defined(__AVX2__)
    return (Register)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// sum + a * b in the register of the sum, at this place (`kept`). Compilers choose other registers, and then move sums.
inline Register accumulate(Register a, Register b, Register sum) {
#if defined(__FMA__) && defined(__AVX2__) && !defined(__AVX512F__)
    asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
#else
    return kept(multiply_add(a, b, sum));
#endif
}

// sum + the product of the first bfloat16 of each lane's pairs, then + that of the second; AVX512-BF16 has an order of its
// own, and no subnormals.
inline Register multiply_add_pairs(Bits a, Bits b, Register sum) {
#if defined(__AVX512BF16__)
    return (Register)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
#else
    sum = multiply_add((Register)(a << 16), (Register)(b << 16), sum);
    return multiply_add((Register)(a & 0xffff0000u), (Register)(b & 0xffff0000u), sum);
#endif
}

// sum + the products of each lane's four 8-bit integers, unsigned ones by signed ones; exact.
inline Integers multiply_add_bytes(Bits a, Bits b, Integers sum) {
#if defined(__AVX512VNNI__)
    return (Integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
    for (int i = 0; i < 32; i += 8) sum += (Integers)(a >> i & 0xffu) * ((Integers)(b << (24 - i)) >> 24);
    return sum;
#endif
}

// The upper byte of each 16 bits.
inline Bits upper_bytes(Bits x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return (Bits)_mm256_srli_epi16((__m256i)x, 8);
#else
    return x >> 8 & 0x00ff00ffu;
#endif
}

// sum + the products of each lane's two 16-bit integers; exact if the sum of both is.
inline Integers multiply_add_shorts(Bits a, Bits b, Integers sum) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return sum + (Integers)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    for (int i = 0; i < 32; i += 16) sum += ((Integers)(a << (16 - i)) >> 16) * ((Integers)(b << (16 - i)) >> 16);
    return sum;
#endif
}

// ---- Vectors by registers ----

// What compilers do lane by lane where no register is as wide as the vectors: the operation, one register after the other.
template <class Out, class Operation, class... In>
inline Out by_registers(const Operation& operation, const In&... in) {
#if defined(__AVX512F__)
    return (Out)operation(in...);
#else
    const auto part = [](const auto& x, int i) {
        using Part = std::conditional_t<std::is_same_v<std::decay_t<decltype(x)>, Floats>, Register, Integers>;
        Part some;
        std::memcpy(&some, (const char*)&x + i * REGISTER_BYTES, sizeof some);
        return some;
    };
    Out out;
    for (int i = 0; i < LANES / REGISTER_LANES; ++i) {
        const auto some = operation(part(in, i)...);
        std::memcpy((char*)&out + i * REGISTER_BYTES, &some, sizeof some);
    }
    return out;
#endif
}

inline Floats fused(Floats a, Floats b, Floats c) {
    return by_registers<Floats>([](auto a, auto b, auto c) { return multiply_add(a, b, c); }, a, b, c);
}

inline Floats larger(Floats a, Floats b) {
    return by_registers<Floats>([](auto a, auto b) { return a > b ? a : b; }, a, b);
}

inline Floats smaller(Floats a, Floats b) {
    return by_registers<Floats>([](auto a, auto b) { return a < b ? a : b; }, a, b);
}

inline float maximum(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    Register parts[LANES / REGISTER_LANES];
    std::memcpy(parts, &x, sizeof parts);
    Register all = parts[0];
    for (const Register& part : parts) all = part > all ? part : all;
    float best = all[0];
    for (int lane = 1; lane < REGISTER_LANES; lane++) best = all[lane] > best ? all[lane] : best;
    return best;
#endif
}

// 1 / x within 2 units in the last place; where that is subnormal, or x is infinite, 0.
inline Floats reciprocal(Floats x) {
#if defined(__AVX512F__)
    // Newton's method doubles the 14 bits that the instruction knows.
    const Floats first = (Floats)_mm512_rcp14_ps((__m512)x);
    const Floats error = fused(-x, first, all(1.0f));
    return x * first == x * first ? fused(first, error, first) : first;
#else
    return 1.0f / x;
#endif
}

// e^x for x <= 88, within 2 units in the last place; below -87.3, where the result would be subnormal, and for NaN, 0.
inline Register exp(Register x) {
    // x = n ln 2 + r with |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds to an integer, which the low bits then hold.
    const Register shift = broadcast(0x1.8p23f);
    const Register shifted = multiply_add(x, broadcast(0x1.715476p0f), shift);
    const Register n = shifted - shift;
    // ln 2 = 355 / 512 - 0.000212...: n * 355 / 512 is exact.
    Register r = multiply_add(n, broadcast(-0x1.63p-1f), x);
    r = multiply_add(n, broadcast(0x1.bd0106p-13f), r);
    // (e^r - 1 - r) / r^2, the minimax polynomial for the relative error of e^r.
    Register q = broadcast(0x1.6a23cep-10f);
    q = multiply_add(q, r, broadcast(0x1.123a2p-7f));
    q = multiply_add(q, r, broadcast(0x1.5558f2p-5f));
    q = multiply_add(q, r, broadcast(0x1.555492p-3f));
    q = multiply_add(q, r, broadcast(0x1.fffffcp-2f));
    const Register power = multiply_add(q * r, r, r) + 1.0f;
    const Bits result = (Bits)power + ((Bits)shifted << 23);
    return (Register)(result & (Bits)(x >= -87.3f));
}

#if !defined(__AVX512F__)
inline Floats exp(Floats x) {
    return by_registers<Floats>([](Register x) { return exp(x); }, x);
}
#endif

// A float64 sum of floats, always in the same order.
struct Sum {
    Doubles first{}, second{};

    void add(Doubles a, Doubles b) { first += a, second += b; }

    void add(Floats x) { add(doubles(low(x)), doubles(high(x))); }

    double total() const {
        const Doubles both = first + second;
        return ((both[0] + both[1]) + (both[2] + both[3])) + ((both[4] + both[5]) + (both[6] + both[7]));
    }
};
