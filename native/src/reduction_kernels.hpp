// The kernels of reduction.hpp, compiled once per set of instructions: each reduction_*.cpp defines
// VECTOR_BYTES and KERNEL_TABLE, is compiled with flags of its own, and includes this file.
//
// Everything here is in an unnamed namespace and calls no inline function of another header: the
// linker keeps one copy of those, and it might be the one with instructions that the CPU lacks.
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "reduction_tables.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {
namespace {

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(VECTOR_BYTES)));
};

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// How elements of a type become a vector to calculate with, and how they are stored.

template <class T>
struct Plain {
  using Vector = typename VectorOf<T>::type;
  static constexpr std::size_t lanes = VECTOR_BYTES / sizeof(T);
  static constexpr std::size_t element_bytes = sizeof(T);
  static Vector load(const std::byte* from) {
    Vector values;
    __builtin_memcpy(&values, from, sizeof values);
    return values;
  }
  static void store(std::byte* to, Vector values) { __builtin_memcpy(to, &values, sizeof values); }
};

using Floats = VectorOf<float>::type;
using Words = VectorOf<std::uint32_t>::type;
constexpr std::size_t float_lanes = VECTOR_BYTES / 4;
typedef std::uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2)));

inline Words widened(const std::byte* from) {
  Halves halves;
  __builtin_memcpy(&halves, from, sizeof halves);
  return __builtin_convertvector(halves, Words);
}

inline void store_narrowed(std::byte* to, Words words) {
  const Halves halves = __builtin_convertvector(words, Halves);
  __builtin_memcpy(to, &halves, sizeof halves);
}

// AVX512_BF16's own conversion is not used: it takes subnormal numbers for zero.
struct BFloat16 {
  using Vector = Floats;
  static constexpr std::size_t lanes = float_lanes;
  static constexpr std::size_t element_bytes = 2;
  static Vector load(const std::byte* from) { return bits_as<Floats>(widened(from) << 16); }
  static void store(std::byte* to, Vector values) {
    const Words bits = bits_as<Words>(values);
    const Words rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
    const Words quiet = (bits >> 16) | 0x40U;  // a NaN stays one
    store_narrowed(to, (bits & 0x7fffffffU) > 0x7f800000U ? quiet : rounded);
  }
};

#if defined(__AVX512F__)
struct Float16 {
  using Vector = Floats;
  static constexpr std::size_t lanes = float_lanes;
  static constexpr std::size_t element_bytes = 2;
  static Vector load(const std::byte* from) {
    __m256i halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    return (Vector)_mm512_cvtph_ps(halves);
  }
  static void store(std::byte* to, Vector values) {
    const __m256i halves = _mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT);
    __builtin_memcpy(to, &halves, sizeof halves);
  }
};
#elif defined(__F16C__)
struct Float16 {
  using Vector = Floats;
  static constexpr std::size_t lanes = float_lanes;
  static constexpr std::size_t element_bytes = 2;
  static Vector load(const std::byte* from) {
    __m128i halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    return (Vector)_mm256_cvtph_ps(halves);
  }
  static void store(std::byte* to, Vector values) {
    const __m128i halves = _mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT);
    __builtin_memcpy(to, &halves, sizeof halves);
  }
};
#else
// In integers and floats alone; the same bits as the instructions give.
struct Float16 {
  using Vector = Floats;
  static constexpr std::size_t lanes = float_lanes;
  static constexpr std::size_t element_bytes = 2;
  static Vector load(const std::byte* from) {
    const Words half = widened(from);
    const Words sign = (half & 0x8000U) << 16;
    const Words magnitude = half & 0x7fffU;
    const Words normal = (magnitude << 13) + 0x38000000U;
    const Words special = (magnitude << 13) | 0x7f800000U;  // infinity, NaN
    const Words quiet = special | 0x400000U;
    // A subnormal number is its integer value times 2^-24.
    const Floats small = __builtin_convertvector(magnitude, Floats) * 0x1p-24F;
    Words bits = magnitude < 0x400U ? bits_as<Words>(small) : normal;
    bits = magnitude >= 0x7c00U ? special : bits;
    bits = magnitude > 0x7c00U ? quiet : bits;
    return bits_as<Floats>(bits | sign);
  }
  static void store(std::byte* to, Vector values) {
    const Words bits = bits_as<Words>(values);
    const Words sign = (bits >> 16) & 0x8000U;
    const Words magnitude = bits & 0x7fffffffU;
    const Words odd = (magnitude >> 13) & 1U;
    const Words normal = (magnitude - 0x38000000U + 0xfffU + odd) >> 13;
    // Adding 0.5 leaves the float16 subnormal, rounded, in the low bits of the sum.
    const Words small = bits_as<Words>(bits_as<Floats>(magnitude) + 0.5F) - 0x3f000000U;
    const Words quiet = 0x7e00U | ((magnitude >> 13) & 0x3ffU);
    Words half = magnitude < 0x38800000U ? small : normal;
    half = magnitude >= 0x477ff000U ? half * 0U + 0x7c00U : half;  // rounds to infinity
    half = magnitude > 0x7f800000U ? quiet : half;
    store_narrowed(to, half | sign);
  }
};
#endif

// The operations; `finish` is applied once, to the result over all sources.

template <class Vector>
struct Sum {
  static Vector apply(Vector a, Vector b) { return a + b; }
  static Vector finish(Vector sum, std::size_t) { return sum; }
};
template <class Vector>
struct Average : Sum<Vector> {
  static Vector finish(Vector sum, std::size_t ranks) {
    using Element = decltype(sum[0] + sum[0]);
    return sum / static_cast<Element>(ranks);
  }
};
template <class Vector>
struct Product {
  static Vector apply(Vector a, Vector b) { return a * b; }
  static Vector finish(Vector product, std::size_t) { return product; }
};
// A NaN of any rank is the result: it is what a diverged run must show.
template <class Vector>
struct Minimum {
  static Vector apply(Vector a, Vector b) { return ((a < b) | (a != a)) ? a : b; }
  static Vector finish(Vector least, std::size_t) { return least; }
};
template <class Vector>
struct Maximum {
  static Vector apply(Vector a, Vector b) { return ((a > b) | (a != a)) ? a : b; }
  static Vector finish(Vector most, std::size_t) { return most; }
};
template <class Vector>
struct BitAnd {
  static Vector apply(Vector a, Vector b) { return a & b; }
  static Vector finish(Vector bits, std::size_t) { return bits; }
};
template <class Vector>
struct BitOr {
  static Vector apply(Vector a, Vector b) { return a | b; }
  static Vector finish(Vector bits, std::size_t) { return bits; }
};
template <class Vector>
struct BitXor {
  static Vector apply(Vector a, Vector b) { return a ^ b; }
  static Vector finish(Vector bits, std::size_t) { return bits; }
};

// How far ahead of its use a line is asked for. The hardware would stop at the end of each page, and
// shared memory mostly has small ones.
constexpr std::size_t prefetch_bytes = 1536;

using Words64 = VectorOf<std::uint64_t>::type;

// Past the cache where there is such a store.
template <bool past_cache>
void store_words(std::byte* to, Words64 words) {
#if defined(__AVX512F__)
  if constexpr (past_cache) return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)words);
#elif defined(__AVX2__)
  if constexpr (past_cache) return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)words);
#endif
  __builtin_memcpy(to, &words, sizeof words);
}

// Source: `const std::byte`, or `std::byte` to write the source's lines as well, with what is there.
template <bool past_cache, class Source>
void copy_lines(std::byte* to, Source* from, std::size_t bytes) {
  std::size_t at = 0;
  // A vector that crosses a line is stored at half the rate.
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(to) % sizeof(Words64);
  for (; at < head && at < bytes; ++at) to[at] = from[at];
  for (; at + sizeof(Words64) <= bytes; at += sizeof(Words64)) {
    __builtin_prefetch(from + at + prefetch_bytes);
    Words64 words;
    __builtin_memcpy(&words, from + at, sizeof words);
    store_words<past_cache>(to + at, words);
    if constexpr (!std::is_const_v<Source>) {
      asm volatile("" ::: "memory");  // else the compiler may see that the store changes nothing
      __builtin_memcpy(from + at, &words, sizeof words[0]);  // enough, and mostly in one line
    }
  }
  for (; at < bytes; ++at) to[at] = from[at];
#if defined(__x86_64__)
  if constexpr (past_cache) _mm_sfence();  // such stores are not ordered with those that follow
#endif
}

// Whole vectors of two sources, for one or two targets: what two ranks need. The pointers are
// locals, because for all the compiler knows a store through them may change the arrays.
template <class Type, class Op, bool second_target>
std::size_t reduce_two(const std::byte* first, const std::byte* second, std::byte* target,
                       std::byte* other, std::size_t count) {
  constexpr std::size_t vector_bytes = Type::lanes * Type::element_bytes;
  const std::size_t whole = count / Type::lanes * vector_bytes;
  for (std::size_t at = 0; at < whole; at += vector_bytes) {
    __builtin_prefetch(first + at + prefetch_bytes);
    __builtin_prefetch(second + at + prefetch_bytes);
    const auto result =
        Op::finish(Op::apply(Type::load(first + at), Type::load(second + at)), 2);
    Type::store(target + at, result);
    if constexpr (second_target) Type::store(other + at, result);
  }
  return whole;
}

template <class Type, class Op>
typename Type::Vector reduce_at(const std::byte* const* sources, std::size_t source_count,
                                std::size_t at) {
  auto result = Type::load(sources[0] + at);
  for (std::size_t i = 1; i < source_count; ++i)
    result = Op::apply(result, Type::load(sources[i] + at));
  return Op::finish(result, source_count);
}

template <class Type, class Op>
std::size_t reduce_any(const Reduction& work) {
  constexpr std::size_t vector_bytes = Type::lanes * Type::element_bytes;
  const std::size_t whole = work.count / Type::lanes * vector_bytes;
  const auto* sources = work.sources;
  const std::size_t source_count = work.source_count;
  auto* const* targets = work.targets;
  const std::size_t target_count = work.target_count;
  for (std::size_t at = 0; at < whole; at += vector_bytes) {
    const auto result = reduce_at<Type, Op>(sources, source_count, at);
    for (std::size_t i = 0; i < target_count; ++i) Type::store(targets[i] + at, result);
  }
  return whole;
}

// The elements behind the last whole vector, as a vector that is filled up with zeros.
template <class Type, class Op>
void reduce_rest(const Reduction& work, std::size_t at) {
  const std::size_t rest = work.count * Type::element_bytes - at;
  if (rest == 0) return;
  alignas(64) std::byte padded[64] = {};
  const auto load = [&](const std::byte* from) {
    __builtin_memcpy(padded, from + at, rest);
    return Type::load(padded);
  };
  auto result = load(work.sources[0]);
  for (std::size_t i = 1; i < work.source_count; ++i)
    result = Op::apply(result, load(work.sources[i]));
  Type::store(padded, Op::finish(result, work.source_count));
  for (std::size_t i = 0; i < work.target_count; ++i)
    __builtin_memcpy(work.targets[i] + at, padded, rest);
}

template <class Type, template <class> class Operation>
void reduce(const Reduction& work) {
  using Op = Operation<typename Type::Vector>;
  const auto* sources = work.sources;
  auto* const* targets = work.targets;
  std::size_t done;
  if (work.source_count == 2 && work.target_count == 2)
    done = reduce_two<Type, Op, true>(sources[0], sources[1], targets[0], targets[1], work.count);
  else if (work.source_count == 2 && work.target_count == 1)
    done = reduce_two<Type, Op, false>(sources[0], sources[1], targets[0], nullptr, work.count);
  else
    done = reduce_any<Type, Op>(work);
  reduce_rest<Type, Op>(work, done);
}

// Rows in the order of DType, columns in that of ReduceOp. Sums, products and bits are the same for
// signed and unsigned integers; unsigned ones have no undefined overflow.
#define FLOAT_ROW(Type)                                                                     \
  {reduce<Type, Sum>, reduce<Type, Average>, reduce<Type, Minimum>, reduce<Type, Maximum>,  \
   reduce<Type, Product>, nullptr, nullptr, nullptr}
#define INTEGER_ROW(Signed, Unsigned)                                                       \
  {reduce<Plain<Unsigned>, Sum>,    nullptr,                                                \
   reduce<Plain<Signed>, Minimum>,  reduce<Plain<Signed>, Maximum>,                         \
   reduce<Plain<Unsigned>, Product>, reduce<Plain<Unsigned>, BitAnd>,                       \
   reduce<Plain<Unsigned>, BitOr>,  reduce<Plain<Unsigned>, BitXor>}

}  // namespace

extern const KernelTable KERNEL_TABLE;
const KernelTable KERNEL_TABLE = {{
    FLOAT_ROW(Plain<float>),
    FLOAT_ROW(Plain<double>),
    FLOAT_ROW(Float16),
    FLOAT_ROW(BFloat16),
    INTEGER_ROW(std::int8_t, std::uint8_t),
    INTEGER_ROW(std::int16_t, std::uint16_t),
    INTEGER_ROW(std::int32_t, std::uint32_t),
    INTEGER_ROW(std::int64_t, std::uint64_t),
    INTEGER_ROW(std::uint8_t, std::uint8_t),
    {reduce<Plain<std::uint8_t>, BitOr>, nullptr, reduce<Plain<std::uint8_t>, BitAnd>,
     reduce<Plain<std::uint8_t>, BitOr>, reduce<Plain<std::uint8_t>, BitAnd>,
     reduce<Plain<std::uint8_t>, BitAnd>, reduce<Plain<std::uint8_t>, BitOr>,
     reduce<Plain<std::uint8_t>, BitXor>},
}, copy_lines<false, const std::byte>, copy_lines<true, const std::byte>,
    copy_lines<false, std::byte>, copy_lines<true, std::byte>};

}  // namespace paceline
