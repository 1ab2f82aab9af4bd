// What a step of a decoder computes on a CPU with AVX-512, one function for each kind of operation.
//
// Activations are float32, weights and KV float32 or bfloat16 (rounded once, when they are packed or written), sums
// are float32. Every function gives a row the same bits whatever other rows there are and however many threads work:
// along a row's sums the order of the terms is fixed, and rows are only ever split, never joined.
//
// Legend: M rows, N outputs, K inputs; S sequences, Hq and H query and key/value heads, G = Hq / H, D head_dim.

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

namespace {

using f32x16 = __m512;

constexpr int LANES = 16;
constexpr int PANEL = 32;       // outputs of a packed panel
constexpr int ROWS = 12;        // of one tile of a product: 24 sums stay in registers
constexpr int64_t ROW_BLOCK = 96;    // rows that are multiplied with a panel while it is in the cache
constexpr int64_t DEPTH = 1536; // inputs that are summed up before the next ones are looked at
constexpr int KEYS = 32;        // of one tile of attention, counted from position 0
constexpr int QUERIES = 48;     // rows of one tile of attention: so many, or those of one token
constexpr float LOWEST = -1e30f;  // less than any score, and finite

// Threads ---------------------------------------------------------------------------------------------------------

// A few threads that spin for some microseconds after a piece of work, because the next one follows soon, and then
// sleep.
class Pool {
 public:
  explicit Pool(int size) {
    for (int i = 1; i < size; ++i) workers_.emplace_back([this] { work(); });
  }

  ~Pool() {
    stopped_ = true;
    ++round_;
    round_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls task(i) for each i below count, on all threads; returns when all are done. From one thread at a time.
  template <class Task>
  void run(int64_t count, const Task& task) {
    if (workers_.empty() || count <= 1) {
      for (int64_t i = 0; i < count; ++i) task(i);
      return;
    }
    task_ = [&task](int64_t i) { task(i); };
    count_ = count;
    next_ = 0;
    busy_ = static_cast<int>(workers_.size());
    ++round_;
    round_.notify_all();
    take();
    while (busy_.load(std::memory_order_acquire)) _mm_pause();
  }

 private:
  void take() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) task_(i);
  }

  void work() {
    uint32_t seen = 0;
    for (;;) {
      for (int i = 0; i < SPINS && round_.load(std::memory_order_acquire) == seen; ++i) _mm_pause();
      while (round_.load(std::memory_order_acquire) == seen) round_.wait(seen);
      seen = round_;
      if (stopped_) return;
      take();
      busy_.fetch_sub(1, std::memory_order_release);
    }
  }

  static constexpr int SPINS = 2000;
  std::vector<std::thread> workers_;
  std::function<void(int64_t)> task_;
  int64_t count_ = 0;
  std::atomic<int64_t> next_{0};
  std::atomic<int> busy_{0};
  std::atomic<uint32_t> round_{0};
  std::atomic<bool> stopped_{false};
};

// Numbers ---------------------------------------------------------------------------------------------------------

// exp, to about one unit in the last place; exactly 0 below -87, infinite from 89 on. What is no number stays none: of
// two values the instructions for the larger and the smaller give the second if one is.
inline f32x16 exp16(f32x16 x) {
  const __mmask16 tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
  x = _mm512_min_ps(_mm512_set1_ps(89.0f), _mm512_max_ps(_mm512_set1_ps(-87.0f), x));
  const f32x16 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  f32x16 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  f32x16 p = _mm512_set1_ps(1.9875691500e-4f);  // Cephes' expf
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_mask_blend_ps(tiny, _mm512_scalef_ps(p, n), _mm512_setzero_ps());
}

inline uint16_t to_bf16(float x) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline f32x16 load16(const float* from) { return _mm512_loadu_ps(from); }
inline f32x16 load16(const uint16_t* from) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline void store16(float* to, f32x16 x) { _mm512_storeu_ps(to, x); }
inline void store16(uint16_t* to, f32x16 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

// Products --------------------------------------------------------------------------------------------------------

// A packed weight is [panel][K][PANEL]. In bfloat16 the outputs j and j + 16 of a panel lie side by side: both halves
// of a 32-bit lane become float32 with one instruction each.

inline void weights32(const float* from, f32x16& low, f32x16& high) {
  low = _mm512_loadu_ps(from);
  high = _mm512_loadu_ps(from + LANES);
}
inline void weights32(const uint16_t* from, f32x16& low, f32x16& high) {
  const __m512i both = _mm512_loadu_si512(from);
  low = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  high = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))));
}

// sums[R][PANEL] (+)= x[R][depth] * panel[depth][PANEL].
template <int R, class W>
inline __attribute__((always_inline)) void multiply_tile(const float* x, int64_t x_step, const W* panel,
                                                         int64_t depth, float* sums, int64_t sums_step, bool go_on) {
  f32x16 low[R], high[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    low[r] = go_on ? _mm512_loadu_ps(sums + r * sums_step) : _mm512_setzero_ps();
    high[r] = go_on ? _mm512_loadu_ps(sums + r * sums_step + LANES) : _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < depth; ++k) {
    f32x16 w0, w1;
    weights32(panel + k * PANEL, w0, w1);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const f32x16 value = _mm512_set1_ps(x[r * x_step + k]);
      low[r] = _mm512_fmadd_ps(value, w0, low[r]);
      high[r] = _mm512_fmadd_ps(value, w1, high[r]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    _mm512_storeu_ps(sums + r * sums_step, low[r]);
    _mm512_storeu_ps(sums + r * sums_step + LANES, high[r]);
  }
}

template <class W>
void multiply_rows(int64_t rows, const float* x, int64_t x_step, const W* panel, int64_t depth, float* sums,
                   int64_t sums_step, bool go_on) {
  for (int64_t tiles = (rows + ROWS - 1) / ROWS; tiles > 0; --tiles) {
    const int64_t some = (rows + tiles - 1) / tiles;  // of like size: a small tile has too few sums to keep busy
    switch (some) {
#define CASE(R) \
  case R:       \
    multiply_tile<R>(x, x_step, panel, depth, sums, sums_step, go_on); \
    break;
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    }
    rows -= some;
    x += some * x_step;
    sums += some * sums_step;
  }
}

template <class W>
void product_panels(const float* x, int64_t x_step, int64_t rows, int64_t inputs, const W* packed, int64_t first,
                    int64_t last, const float* bias, float* out, int64_t outputs) {
  alignas(64) float spare[ROW_BLOCK * PANEL];
  for (int64_t begin = 0; begin < inputs; begin += DEPTH) {
    const int64_t depth = std::min(DEPTH, inputs - begin);
    for (int64_t panel = first; panel < last; ++panel) {
      const W* weights = packed + (panel * inputs + begin) * PANEL;
      const int64_t column = panel * PANEL, width = std::min<int64_t>(PANEL, outputs - column);
      if (width == PANEL) {
        multiply_rows(rows, x + begin, x_step, weights, depth, out + column, outputs, begin > 0);
      } else {  // the last outputs: out has no room for a whole panel
        for (int64_t r = 0; begin > 0 && r < rows; ++r) {
          std::memcpy(spare + r * PANEL, out + r * outputs + column, width * sizeof(float));
        }
        multiply_rows(rows, x + begin, x_step, weights, depth, spare, PANEL, begin > 0);
        for (int64_t r = 0; r < rows; ++r) {
          std::memcpy(out + r * outputs + column, spare + r * PANEL, width * sizeof(float));
        }
      }
    }
  }
  if (bias == nullptr) return;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t n = first * PANEL; n < std::min(last * PANEL, outputs); ++n) out[r * outputs + n] += bias[n];
  }
}

// Calls work(row, rows, first panel, last panel) for all of a product, in pieces of like work: a few for each thread
// where there is enough of it. Panels of one piece lie side by side.
template <class Work>
void over_panels(Pool& pool, int64_t rows, int64_t panels, const Work& work) {
  const int64_t blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
  if (blocks == 0) return;
  const int64_t wanted = pool.size() == 1 ? 1 : pool.size() * (rows > ROWS ? 4 : 1);
  const int64_t cuts = std::min<int64_t>(panels, std::max<int64_t>(1, wanted / blocks));
  pool.run(blocks * cuts, [&](int64_t piece) {
    const int64_t block = piece / cuts, cut = piece % cuts, row = block * ROW_BLOCK;
    work(row, std::min(ROW_BLOCK, rows - row), panels * cut / cuts, panels * (cut + 1) / cuts);
  });
}

template <class W>
void product(Pool& pool, const float* x, int64_t x_step, int64_t rows, int64_t inputs, const W* packed,
             const float* bias, float* out, int64_t outputs) {
  const int64_t panels = (outputs + PANEL - 1) / PANEL;
  over_panels(pool, rows, panels, [&](int64_t row, int64_t count, int64_t first, int64_t last) {
    product_panels(x + row * x_step, x_step, count, inputs, packed, first, last, bias, out + row * outputs, outputs);
  });
}

// Rows by rows ----------------------------------------------------------------------------------------------------

constexpr int64_t ROWS_OF_A_PIECE = 16;

template <class Row>
void by_rows(Pool& pool, int64_t rows, const Row& row) {
  const int64_t pieces = (rows + ROWS_OF_A_PIECE - 1) / ROWS_OF_A_PIECE;
  pool.run(pieces, [&](int64_t piece) {
    const int64_t last = std::min(rows, (piece + 1) * ROWS_OF_A_PIECE);
    for (int64_t i = piece * ROWS_OF_A_PIECE; i < last; ++i) row(i);
  });
}

inline __mmask16 left(int64_t count) { return count >= LANES ? 0xFFFF : static_cast<__mmask16>((1u << count) - 1); }

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define BATON_QUANTISED 1

// Products of quantised weights -------------------------------------------------------------------------------------

// GROUP neighbouring inputs of an output share a scale d (and, with 4 bits, a minimum m): a weight is d * (code - 128)
// with 8 bits, d * code + m with 4. Activations are rounded to 8 bits when they are multiplied, each group of a row
// with a scale of its own. Sums within a group are of integers, and exact; groups are added up in order.
//
// Packed: [panel][group] of codes, then PANEL scales, then PANEL minima, in half precision. Codes are
// [4 inputs][PANEL][4], two such steps in the halves of one byte with 4 bits.

constexpr int64_t GROUP = 32;
constexpr int STEP = 4;  // inputs that one instruction multiplies
constexpr int QUANTISED_ROWS = 6;

constexpr int64_t group_bytes(int64_t bits) { return PANEL * GROUP * bits / 8 + PANEL * (bits == 8 ? 2 : 4); }
inline int64_t groups_of(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }

// Activations of some rows: codes [row][groups * GROUP], scales and sums of codes [row][groups].
struct Quantised {
  int8_t* codes;
  float* scales;
  int32_t* sums;
  int64_t groups;
};

void quantise_row(const float* x, int64_t inputs, const Quantised& to, int64_t row) {
  for (int64_t group = 0; group < to.groups; ++group) {
    const int64_t begin = group * GROUP, count = inputs - begin;
    const f32x16 low = _mm512_maskz_loadu_ps(left(count), x + begin);
    const __mmask16 behind = count > LANES ? left(count - LANES) : 0;
    const f32x16 high = _mm512_maskz_loadu_ps(behind, x + begin + LANES);
    const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
    const f32x16 factor = _mm512_set1_ps(largest > 0 ? 127.0f / largest : 0.0f);
    const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(low, factor));
    const __m512i b = _mm512_cvtps_epi32(_mm512_mul_ps(high, factor));
    int8_t* codes = to.codes + (row * to.groups + group) * GROUP;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm512_cvtepi32_epi8(a));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + LANES), _mm512_cvtepi32_epi8(b));
    // What is no number has no code: its group's scale is none either, and so is what comes of it.
    const bool numbers = !_mm512_cmp_ps_mask(low, low, _CMP_UNORD_Q) && !_mm512_cmp_ps_mask(high, high, _CMP_UNORD_Q);
    to.scales[row * to.groups + group] = numbers && largest < INFINITY ? largest / 127.0f : NAN;
    to.sums[row * to.groups + group] = _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
  }
}

inline f32x16 half16(const uint8_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// out[R][width] = x[R] * panel + bias; ``width`` outputs of the panel are wanted.
template <int R, int BITS>
inline __attribute__((always_inline)) void multiply_groups(const Quantised& x, int64_t row, const uint8_t* panel,
                                                           int64_t width, const float* bias, float* out,
                                                           int64_t out_step) {
  f32x16 sums[R][2];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  for (int64_t group = 0; group < x.groups; ++group, panel += group_bytes(BITS)) {
    const int64_t first = row * x.groups + group;
    __m512i whole[R][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      whole[r][0] = whole[r][1] = _mm512_set1_epi32(BITS == 8 ? -128 * x.sums[first + r * x.groups] : 0);
    }
    const int8_t* codes = x.codes + first * GROUP;
    const auto add = [&](int step, __m512i w0, __m512i w1) __attribute__((always_inline)) {
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        int32_t four;
        std::memcpy(&four, codes + r * x.groups * GROUP + step * STEP, 4);
        const __m512i value = _mm512_set1_epi32(four);
        whole[r][0] = _mm512_dpbusd_epi32(whole[r][0], w0, value);
        whole[r][1] = _mm512_dpbusd_epi32(whole[r][1], w1, value);
      }
    };
    if constexpr (BITS == 8) {
#pragma GCC unroll 8
      for (int step = 0; step < 8; ++step) {
        add(step, _mm512_loadu_si512(panel + step * 128), _mm512_loadu_si512(panel + step * 128 + 64));
      }
    } else {
      const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 4
      for (int pair = 0; pair < 4; ++pair) {
        const __m512i w0 = _mm512_loadu_si512(panel + pair * 128), w1 = _mm512_loadu_si512(panel + pair * 128 + 64);
        add(2 * pair, _mm512_and_si512(w0, low), _mm512_and_si512(w1, low));
        add(2 * pair + 1, _mm512_and_si512(_mm512_srli_epi16(w0, 4), low),
            _mm512_and_si512(_mm512_srli_epi16(w1, 4), low));
      }
    }
    const uint8_t* scales = panel + PANEL * GROUP * BITS / 8;
    for (int half = 0; half < 2; ++half) {
      const f32x16 scale = half16(scales + half * 32);
      const f32x16 minimum = BITS == 4 ? half16(scales + 64 + half * 32) : _mm512_setzero_ps();
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const float of_row = x.scales[first + r * x.groups];
        f32x16 part = _mm512_mul_ps(_mm512_cvtepi32_ps(whole[r][half]), scale);
        if (BITS == 4) {
          part = _mm512_fmadd_ps(minimum, _mm512_set1_ps(static_cast<float>(x.sums[first + r * x.groups])), part);
        }
        sums[r][half] = _mm512_fmadd_ps(part, _mm512_set1_ps(of_row), sums[r][half]);
      }
    }
  }
  for (int half = 0; half < 2; ++half) {
    const __mmask16 mask = width > half * LANES ? left(width - half * LANES) : 0;
    const f32x16 added = bias ? _mm512_maskz_loadu_ps(mask, bias + half * LANES) : _mm512_setzero_ps();
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      _mm512_mask_storeu_ps(out + r * out_step + half * LANES, mask, _mm512_add_ps(sums[r][half], added));
    }
  }
}

template <int BITS>
void product_groups(Pool& pool, int64_t rows, const Quantised& x, const uint8_t* packed, const float* bias, float* out,
                    int64_t outputs) {
  over_panels(pool, rows, (outputs + PANEL - 1) / PANEL, [&](int64_t row, int64_t count, int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; ++panel) {
      const uint8_t* weights = packed + panel * x.groups * group_bytes(BITS);
      const int64_t column = panel * PANEL, width = std::min<int64_t>(PANEL, outputs - column);
      const float* added = bias ? bias + column : nullptr;
      int64_t at = row, left_over = count;
      for (int64_t tiles = (count + QUANTISED_ROWS - 1) / QUANTISED_ROWS; tiles > 0; --tiles) {
        const int64_t some = (left_over + tiles - 1) / tiles;
        float* to = out + at * outputs + column;
        switch (some) {
#define CASE(R) \
  case R:       \
    multiply_groups<R, BITS>(x, at, weights, width, added, to, outputs); \
    break;
          CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#undef CASE
        }
        at += some;
        left_over -= some;
      }
    }
  });
}

#endif  // quantised weights

// Attention -------------------------------------------------------------------------------------------------------

// One sequence's rows, which see keys and values in ``blocks`` of the pool.
struct Span {
  int64_t first, count, start;
  const int64_t* blocks;
};

struct Shape {
  int64_t num_heads, num_kv_heads, head_dim, block_size;
  int64_t halves;    // 2: keys and values; 1: latents, which are both
  int64_t window;    // positions that a row sees, its own included; 0 for all before it
  float scale, softcap;
};

struct Scratch {
  std::vector<float> keys, values, queries, mixed, scores;
  std::vector<float> highest, total;
};

inline void transpose16(f32x16* r) {
  f32x16 t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xEE);
    r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xDD);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xDD);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xDD);
    r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xDD);
  }
}

// mixed[R][width of 64] += weights[R][count] * values[count][..]
template <int R>
inline __attribute__((always_inline)) void mix_tile(const float* weights, int64_t count, const float* values,
                                                    int64_t step, float* mixed) {
  f32x16 sums[R][4];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < 4; ++i) sums[r][i] = _mm512_loadu_ps(mixed + r * step + i * LANES);
  for (int64_t j = 0; j < count; ++j) {
    f32x16 v[4];
    for (int i = 0; i < 4; ++i) v[i] = _mm512_loadu_ps(values + j * step + i * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const f32x16 weight = _mm512_set1_ps(weights[r * KEYS + j]);
      for (int i = 0; i < 4; ++i) sums[r][i] = _mm512_fmadd_ps(weight, v[i], sums[r][i]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < 4; ++i) _mm512_storeu_ps(mixed + r * step + i * LANES, sums[r][i]);
}

void mix_rows(int64_t rows, const float* weights, int64_t count, const float* values, int64_t step, float* mixed) {
  while (rows > 0) {
    const int64_t some = rows >= 6 ? 6 : rows;
    for (int64_t column = 0; column < step; column += 64) {
      switch (some) {
#define CASE(R) \
  case R:       \
    mix_tile<R>(weights, count, values + column, step, mixed + column); \
    break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#undef CASE
      }
    }
    rows -= some;
    weights += some * KEYS;
    mixed += some * step;
  }
}

// Tokens ``token .. token + count`` of a span, one key/value head.
template <class T>
void attend_tile(const Shape& shape, const Span& span, const T* pool, int64_t head, int64_t token, int64_t count,
                 const float* q, float* out, Scratch& s) {
  const int64_t dim = shape.head_dim, group = shape.num_heads / shape.num_kv_heads, rows = count * group;
  const int64_t step = (dim + 63) / 64 * 64;  // rows of values and of what is mixed are filled up with zeros
  const int64_t half = shape.block_size * shape.num_kv_heads * dim, token_step = shape.num_kv_heads * dim;
  s.keys.resize(dim * KEYS);
  s.values.resize(KEYS * step);
  s.queries.resize(rows * dim);
  s.mixed.assign(rows * step, 0.0f);
  s.scores.resize(rows * KEYS);
  s.highest.resize(rows);
  s.total.resize(rows);
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = q + ((span.first + token + r / group) * shape.num_heads + head * group + r % group) * dim;
    for (int64_t d = 0; d < dim; ++d) s.queries[r * dim + d] = from[d] * shape.scale;
    s.highest[r] = LOWEST;
    s.total[r] = 0.0f;
  }
  const int64_t first_position = span.start + token, last_position = first_position + count - 1;
  const int64_t seen_from = shape.window ? std::max<int64_t>(0, first_position + 1 - shape.window) : 0;
  for (int64_t tile = seen_from / KEYS * KEYS; tile <= last_position; tile += KEYS) {
    const int64_t keys = std::min<int64_t>(KEYS, last_position + 1 - tile);
    const T* places[KEYS];
    for (int64_t j = 0; j < KEYS; ++j) {
      const int64_t position = tile + std::min(j, keys - 1);
      places[j] = pool + span.blocks[position / shape.block_size] * half * shape.halves +
                  position % shape.block_size * token_step + head * dim;
    }
    for (int64_t j = 0; j < KEYS; j += LANES) {
      for (int64_t d = 0; d < dim; d += LANES) {
        f32x16 square[LANES];
        for (int i = 0; i < LANES; ++i) square[i] = load16(places[j + i] + d);
        transpose16(square);
        for (int i = 0; i < LANES; ++i) _mm512_storeu_ps(s.keys.data() + (d + i) * KEYS + j, square[i]);
      }
    }
    const int64_t to_values = shape.halves == 2 ? half : 0;
    for (int64_t j = 0; j < keys; ++j) {
      float* to = s.values.data() + j * step;
      for (int64_t d = 0; d < dim; d += LANES) store16(to + d, load16(places[j] + to_values + d));
    }
    multiply_rows(rows, s.queries.data(), dim, s.keys.data(), dim, s.scores.data(), KEYS, false);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t position = first_position + r / group;
      float* scores = s.scores.data() + r * KEYS;
      f32x16 x[2] = {_mm512_loadu_ps(scores), _mm512_loadu_ps(scores + LANES)};
      if (shape.softcap > 0) {  // c * tanh(x / c)
        const f32x16 cap = _mm512_set1_ps(shape.softcap), one = _mm512_set1_ps(1.0f);
        for (auto& part : x) {
          const f32x16 grown = exp16(_mm512_mul_ps(part, _mm512_set1_ps(2.0f / shape.softcap)));
          part = _mm512_sub_ps(
              cap, _mm512_div_ps(_mm512_set1_ps(2.0f * shape.softcap), _mm512_add_ps(grown, one)));
        }
      }
      const int64_t until = std::min<int64_t>(KEYS, position + 1 - tile);
      const int64_t from = shape.window ? std::max<int64_t>(0, position + 1 - shape.window - tile) : 0;
      uint64_t seen = until <= 0 || from >= KEYS ? 0 : (until >= 64 ? ~0ull : (1ull << until) - 1) & ~0ull << from;
      if (seen != 0xFFFFFFFFull) {
        const f32x16 lowest = _mm512_set1_ps(-INFINITY);
        x[0] = _mm512_mask_blend_ps(static_cast<__mmask16>(seen), lowest, x[0]);
        x[1] = _mm512_mask_blend_ps(static_cast<__mmask16>(seen >> 16), lowest, x[1]);
      }
      const float highest = std::max(s.highest[r], _mm512_reduce_max_ps(_mm512_max_ps(x[0], x[1])));
      const f32x16 base = _mm512_set1_ps(highest);
      for (auto& part : x) part = exp16(_mm512_sub_ps(part, base));
      _mm512_storeu_ps(scores, x[0]);
      _mm512_storeu_ps(scores + LANES, x[1]);
      const float sum = _mm512_reduce_add_ps(_mm512_add_ps(x[0], x[1]));
      if (highest != s.highest[r]) {
        const f32x16 shrink = exp16(_mm512_set1_ps(s.highest[r] - highest));
        float* mixed = s.mixed.data() + r * step;
        for (int64_t d = 0; d < step; d += LANES) {
          _mm512_storeu_ps(mixed + d, _mm512_mul_ps(_mm512_loadu_ps(mixed + d), shrink));
        }
        s.total[r] *= _mm512_cvtss_f32(shrink);
        s.highest[r] = highest;
      }
      s.total[r] += sum;
    }
    mix_rows(rows, s.scores.data(), keys, s.values.data(), step, s.mixed.data());
  }
  for (int64_t r = 0; r < rows; ++r) {
    float* to = out + ((span.first + token + r / group) * shape.num_heads + head * group + r % group) * dim;
    const float share = 1.0f / s.total[r];
    for (int64_t d = 0; d < dim; ++d) to[d] = s.mixed[r * step + d] * share;
  }
}

template <class T>
void attend(Pool& threads, const Shape& shape, const Span* spans, int64_t num_spans, const T* pool, const float* q,
            float* out) {
  struct Piece {
    int64_t span, token, count;
  };
  thread_local std::vector<Piece> pieces;
  pieces.clear();
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const int64_t most = std::max<int64_t>(1, QUERIES / group);
  for (int64_t i = num_spans - 1; i >= 0; --i) {  // the last tokens of chunks, which take longest, first
    for (int64_t token = (spans[i].count - 1) / most * most; token >= 0; token -= most) {
      pieces.push_back({i, token, std::min(most, spans[i].count - token)});
    }
  }
  const std::vector<Piece>& all = pieces;
  threads.run(static_cast<int64_t>(all.size()) * shape.num_kv_heads, [&](int64_t i) {
    thread_local Scratch scratch;
    const Piece& piece = all[i / shape.num_kv_heads];
    attend_tile(shape, spans[piece.span], pool, i % shape.num_kv_heads, piece.token, piece.count, q, out, scratch);
  });
}

// Rows ------------------------------------------------------------------------------------------------------------

template <class T>
void write_rows(Pool& pool, int64_t rows, int64_t width, const float* from, int64_t from_step, const int64_t* places,
                T* to) {
  by_rows(pool, rows, [&](int64_t r) {
    const float* source = from + r * from_step;
    T* target = to + places[r] * width;
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES) store16(target + d, _mm512_loadu_ps(source + d));
    for (; d < width; ++d) {
      if constexpr (sizeof(T) == 2) target[d] = to_bf16(source[d]);
      else target[d] = source[d];
    }
  });
}

}  // namespace

extern "C" {

// For whoever loads this file: changes with what the functions mean.
int64_t baton_version() { return 3; }

void* baton_pool(int64_t threads) { return new Pool(static_cast<int>(threads)); }
void baton_pool_free(void* pool) { delete static_cast<Pool*>(pool); }

int64_t baton_packed_size(int64_t outputs, int64_t inputs) { return (outputs + PANEL - 1) / PANEL * PANEL * inputs; }

// weight [outputs][inputs] → packed, of baton_packed_size numbers; rounded to bfloat16 where bits is 16.
void baton_pack(const float* weight, int64_t outputs, int64_t inputs, void* packed, int64_t bits) {
  const int64_t panels = (outputs + PANEL - 1) / PANEL;
  for (int64_t panel = 0; panel < panels; ++panel) {
    for (int64_t k = 0; k < inputs; ++k) {
      for (int64_t j = 0; j < PANEL; ++j) {
        const int64_t n = panel * PANEL + j, at = (panel * inputs + k) * PANEL;
        const float value = n < outputs ? weight[n * inputs + k] : 0.0f;
        if (bits == 16) static_cast<uint16_t*>(packed)[at + j % LANES * 2 + j / LANES] = to_bf16(value);
        else static_cast<float*>(packed)[at + j] = value;
      }
    }
  }
}

// out [rows][outputs] = x [rows][inputs] (rows x_step apart) * weight + bias (or null).
void baton_product(void* pool, const float* x, int64_t x_step, int64_t rows, int64_t inputs, const void* packed,
                   int64_t bits, const float* bias, float* out, int64_t outputs) {
  auto& threads = *static_cast<Pool*>(pool);
  if (bits == 16) product(threads, x, x_step, rows, inputs, static_cast<const uint16_t*>(packed), bias, out, outputs);
  else product(threads, x, x_step, rows, inputs, static_cast<const float*>(packed), bias, out, outputs);
}

#ifdef BATON_QUANTISED
int64_t baton_quantised_bytes(int64_t outputs, int64_t inputs, int64_t bits) {
  return (outputs + PANEL - 1) / PANEL * groups_of(inputs) * group_bytes(bits);
}

// Codes [outputs][groups * GROUP], one in a byte, and scales and minima (null with 8 bits) [outputs][groups] in half
// precision → packed, of baton_quantised_bytes bytes.
void baton_pack_codes(const uint8_t* codes, const uint16_t* scales, const uint16_t* minima, int64_t outputs,
                      int64_t groups, int64_t bits, uint8_t* packed) {
  const int64_t size = group_bytes(bits), panels = (outputs + PANEL - 1) / PANEL;
  std::memset(packed, 0, panels * groups * size);
  for (int64_t n = 0; n < outputs; ++n) {
    for (int64_t group = 0; group < groups; ++group) {
      uint8_t* to = packed + (n / PANEL * groups + group) * size;
      const uint8_t* from = codes + (n * groups + group) * GROUP;
      const int64_t lane = n % PANEL;
      for (int64_t k = 0; k < GROUP; ++k) {
        const int64_t step = k / STEP;
        if (bits == 8) to[(step * PANEL + lane) * STEP + k % STEP] = from[k];
        else to[(step / 2 * PANEL + lane) * STEP + k % STEP] |= static_cast<uint8_t>(from[k] << step % 2 * 4);
      }
      auto* halves = reinterpret_cast<uint16_t*>(to + PANEL * GROUP * bits / 8);
      halves[lane] = scales[n * groups + group];
      if (bits == 4) halves[PANEL + lane] = minima[n * groups + group];
    }
  }
}

// As baton_product, for a quantised weight. ``codes`` [rows][groups * GROUP], ``scales`` and ``sums`` [rows][groups]
// are room for the activations.
void baton_product_quantised(void* pool, const float* x, int64_t x_step, int64_t rows, int64_t inputs,
                             const uint8_t* packed, int64_t bits, const float* bias, float* out, int64_t outputs,
                             int8_t* codes, float* scales, int32_t* sums) {
  auto& threads = *static_cast<Pool*>(pool);
  const Quantised small{codes, scales, sums, groups_of(inputs)};
  by_rows(threads, rows, [&](int64_t r) { quantise_row(x + r * x_step, inputs, small, r); });
  if (bits == 8) product_groups<8>(threads, rows, small, packed, bias, out, outputs);
  else product_groups<4>(threads, rows, small, packed, bias, out, outputs);
}
#endif

// out = x / sqrt(mean(x^2) + eps) * weight, each row of ``width``; the rows of x lie x_step apart.
void baton_rms_norm(void* pool, const float* x, int64_t x_step, int64_t rows, int64_t width, const float* weight,
                    float eps, float* out) {
  by_rows(*static_cast<Pool*>(pool), rows, [&](int64_t r) {
    const float* from = x + r * x_step;
    float* to = out + r * width;
    f32x16 squares = _mm512_setzero_ps();
    for (int64_t d = 0; d < width; d += LANES) {
      const f32x16 part = _mm512_maskz_loadu_ps(left(width - d), from + d);
      squares = _mm512_fmadd_ps(part, part, squares);
    }
    const float factor = 1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / static_cast<float>(width) + eps);
    for (int64_t d = 0; d < width; d += LANES) {
      const __mmask16 mask = left(width - d);
      const f32x16 part = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, from + d), _mm512_set1_ps(factor));
      _mm512_mask_storeu_ps(to + d, mask, _mm512_mul_ps(part, _mm512_maskz_loadu_ps(mask, weight + d)));
    }
  });
}

// out [rows][width] = act(both[r][:width]) * both[r][width:]; kind 0: silu, 1: gelu, by way of tanh.
void baton_gated(void* pool, const float* both, int64_t rows, int64_t width, int64_t kind, float* out) {
  by_rows(*static_cast<Pool*>(pool), rows, [&](int64_t r) {
    const float* gate = both + r * 2 * width;
    const f32x16 one = _mm512_set1_ps(1.0f);
    for (int64_t d = 0; d < width; d += LANES) {
      const __mmask16 mask = left(width - d);
      const f32x16 x = _mm512_maskz_loadu_ps(mask, gate + d), up = _mm512_maskz_loadu_ps(mask, gate + width + d);
      f32x16 y = x;  // x * sigmoid(y)
      if (kind == 1) {
        const f32x16 cube = _mm512_mul_ps(x, _mm512_mul_ps(x, x));
        y = _mm512_mul_ps(_mm512_set1_ps(1.5957691216f), _mm512_fmadd_ps(_mm512_set1_ps(0.044715f), cube, x));
      }
      const f32x16 shrunk = exp16(_mm512_sub_ps(_mm512_setzero_ps(), y));
      const f32x16 activated = _mm512_div_ps(x, _mm512_add_ps(shrunk, one));
      _mm512_mask_storeu_ps(out + r * width + d, mask, _mm512_mul_ps(activated, up));
    }
  });
}

// Turns the first 2 * half components of each of ``heads`` heads of x (rows x_step apart); out [rows][heads][dim].
void baton_rotate(void* pool, const float* x, int64_t x_step, int64_t rows, int64_t heads, int64_t dim,
                  const float* cosines, const float* sines, int64_t half, float* out) {
  by_rows(*static_cast<Pool*>(pool), rows, [&](int64_t r) {
    const float *c = cosines + r * half, *s = sines + r * half;
    for (int64_t head = 0; head < heads; ++head) {
      const float* from = x + r * x_step + head * dim;
      float* to = out + (r * heads + head) * dim;
      for (int64_t d = 0; d < half; d += LANES) {
        const __mmask16 mask = left(half - d);
        const f32x16 a = _mm512_maskz_loadu_ps(mask, from + d), b = _mm512_maskz_loadu_ps(mask, from + half + d);
        const f32x16 cosine = _mm512_maskz_loadu_ps(mask, c + d), sine = _mm512_maskz_loadu_ps(mask, s + d);
        _mm512_mask_storeu_ps(to + d, mask, _mm512_fmsub_ps(a, cosine, _mm512_mul_ps(b, sine)));
        _mm512_mask_storeu_ps(to + half + d, mask, _mm512_fmadd_ps(b, cosine, _mm512_mul_ps(a, sine)));
      }
      if (2 * half < dim) std::memcpy(to + 2 * half, from + 2 * half, (dim - 2 * half) * sizeof(float));
    }
  });
}

// Row r of ``from`` (rows from_step apart) becomes row places[r] of ``to`` [..][width], as float32 or bfloat16.
void baton_write(void* pool, const float* from, int64_t from_step, int64_t rows, int64_t width, const int64_t* places,
                 void* to, int64_t bits) {
  auto& threads = *static_cast<Pool*>(pool);
  if (bits == 16) write_rows(threads, rows, width, from, from_step, places, static_cast<uint16_t*>(to));
  else write_rows(threads, rows, width, from, from_step, places, static_cast<float*>(to));
}

// q and out [rows][num_heads][head_dim]. spans [num_spans][4]: first row, count, start, offset into ``blocks``.
// head_dim is a multiple of 16.
void baton_attend(void* pool, const int64_t* spans, int64_t num_spans, const int64_t* blocks, const void* cache,
                  int64_t bits, int64_t halves, int64_t block_size, int64_t num_heads, int64_t num_kv_heads,
                  int64_t head_dim, int64_t window, float scale, float softcap, const float* q, float* out) {
  const Shape shape{num_heads, num_kv_heads, head_dim, block_size, halves, window, scale, softcap};
  thread_local std::vector<Span> all;
  all.clear();
  for (int64_t i = 0; i < num_spans; ++i) {
    const int64_t* span = spans + i * 4;
    all.push_back({span[0], span[1], span[2], blocks + span[3]});
  }
  auto& threads = *static_cast<Pool*>(pool);
  if (bits == 16) attend(threads, shape, all.data(), num_spans, static_cast<const uint16_t*>(cache), q, out);
  else attend(threads, shape, all.data(), num_spans, static_cast<const float*>(cache), q, out);
}
}
