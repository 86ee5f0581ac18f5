// y = x w^T for few rows x[S, D] and some weights, as a call of XLA on CPUs. Weights are read as they are kept, and
// widened to fp32.
//
// Weights lie in blocks of N outputs, [F / N, D, N], so that N neighbouring numbers belong to as many sums. Each sum is
// over groups of entries in order, which may have scales: its bits depend neither on S nor on threads.

#include "call.h"

#define N 32  // outputs of a block
#define WIDE (2 * LANES)  // outputs at a time
#define GROUP 64         // entries that are summed by themselves: long sums lose digits
#define SMALL (1 << 16)  // products that one thread computes sooner than others would come
#define AHEAD 8192  // bytes that are fetched ahead: without, a core waits for memory

typedef struct {
  const float *x, *scale;
  const char *w;
  float *y;
  const int64_t *rows;      // those to compute
  int64_t S, D, F, size;    // their number; entries that are summed by themselves, and share a scale
} Product;

static const float nf4[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

// LANES entries of row d of a block, widened, from output n on.

static inline f32 wide_f32(const char *w, int64_t d, int n) { return *(const f32 *)(w + 4 * (d * N + n)); }

static inline f32 wide_bf16(const char *w, int64_t d, int n) {
  return (f32)(__builtin_convertvector(*(const u16 *)(w + 2 * (d * N + n)), u32) << 16);
}

static inline f32 wide_int8(const char *w, int64_t d, int n) {
  const char *at = w + d * N + n;
#if defined(__AVX512F__)
  return (f32)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
#elif defined(__AVX2__)
  return (f32)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
#else
  i16 narrow = __builtin_convertvector(*(const i8 *)at, i16);
  return __builtin_convertvector(__builtin_convertvector(narrow, i32), f32);
#endif
}

static inline f32 wide_nf4(const char *w, int64_t d, int n) {  // two rows share bytes: the lower bits are the first's
  const char *at = w + d / 2 * N + n;
  const int shift = d % 2 * 4;
#if defined(__AVX512F__)
  __m512i code = _mm512_srli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at)), shift);
  return (f32)_mm512_permutexvar_ps(code, _mm512_loadu_ps(nf4));  // reads the lowest 4 bits
#elif defined(__AVX2__)
  __m256i code = _mm256_srli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at)), shift);
  __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(nf4), code);  // reads the lowest 3 bits
  __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(nf4 + 8), code);
  return (f32)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(code, 28)));
#else
  f32 made;
  for (int i = 0; i < LANES; i++) made[i] = nf4[(uint8_t)at[i] >> shift & 15];
  return made;
#endif
}

// T rows from row s of `rows` on, times WIDE outputs of a block, from output n on. Variables are named by row, so
// that compilers keep sums in registers.

#define EACH1(M) M(0)
#define EACH2(M) EACH1(M) M(1)
#define EACH4(M) EACH2(M) M(2) M(3)
#define EACH8(M) EACH4(M) M(4) M(5) M(6) M(7)
#define SUMS(t) f32 a##t = {0}, b##t = {0};
#define PARTS(t) f32 p##t = {0}, q##t = {0};
#define ROW(t) const float *x##t = p->x + p->rows[s + t] * D;
#define ADD(t) p##t += x##t[d] * left, q##t += x##t[d] * right;
#define SCALE(t) a##t += p##t * *(const f32 *)scale, b##t += q##t * *(const f32 *)(scale + LANES);
#define TAKE(t) a##t += p##t, b##t += q##t;
#define PUT(t) put(p->y + p->rows[s + t] * p->F + first, p->F - first, a##t, b##t);

static inline void put(float *y, int64_t room, f32 a, f32 b) {
  f32 both[2] = {a, b};
  if (room > 0) memcpy(y, both, room < WIDE ? room * sizeof(float) : sizeof both);
}

#define ROWS(T, KIND, BITS)                                                              \
  static void rows##T##_##KIND(const Product *p, int64_t block, int n, int64_t s) {      \
    const int64_t D = p->D, size = p->size, first = block * N + n;                       \
    const float *scale = p->scale ? p->scale + block * (D / size) * N + n : NULL;        \
    const char *w = p->w + block * (D * N * BITS / 8);                                   \
    EACH##T(ROW) EACH##T(SUMS) for (int64_t begin = 0; begin < D; begin += size) {       \
      const int64_t end = begin + size < D ? begin + size : D;                           \
      EACH##T(PARTS) for (int64_t d = begin; d < end; d++) {                             \
        __builtin_prefetch(w + d * N * BITS / 8 + AHEAD);                                \
        if (BITS == 32) __builtin_prefetch(w + d * N * 4 + AHEAD + 64);                  \
        f32 left = wide_##KIND(w, d, n), right = wide_##KIND(w, d, n + LANES);           \
        EACH##T(ADD)                                                                     \
      }                                                                                  \
      if (scale) {                                                                       \
        EACH##T(SCALE) scale += N;                                                       \
      } else {                                                                           \
        EACH##T(TAKE)                                                                    \
      }                                                                                  \
    }                                                                                    \
    EACH##T(PUT)                                                                         \
  }

#if defined(__AVX512F__)  // as many rows as sums fit into registers
#define EIGHT(KIND, BITS) ROWS(8, KIND, BITS)
#define BY_EIGHT(KIND) for (; s + 8 <= p->S; s += 8) rows8_##KIND(p, block, n, s);
#else
#define EIGHT(KIND, BITS)
#define BY_EIGHT(KIND)
#endif

#define BLOCK(KIND, BITS)                                                                \
  ROWS(1, KIND, BITS) ROWS(2, KIND, BITS) ROWS(4, KIND, BITS) EIGHT(KIND, BITS)          \
  static void block_##KIND(const Product *p, int64_t block) {                            \
    for (int n = 0; n < N; n += WIDE) {                                                  \
      int64_t s = 0;                                                                     \
      BY_EIGHT(KIND)                                                                     \
      for (; s + 4 <= p->S; s += 4) rows4_##KIND(p, block, n, s);                        \
      for (; s + 2 <= p->S; s += 2) rows2_##KIND(p, block, n, s);                        \
      for (; s < p->S; s++) rows1_##KIND(p, block, n, s);                                \
    }                                                                                    \
  }

BLOCK(f32, 32) BLOCK(bf16, 16) BLOCK(int8, 8) BLOCK(nf4, 4)

// The blocks of all weights, which threads share.

typedef struct {
  Product product;
  void (*block)(const Product *, int64_t);
  int64_t blocks;
} Weight;

typedef struct {
  int64_t blocks, pieces;
  const Weight *weights;
} Task;

static void piece(const void *data, int64_t i) {
  const Task *task = data;
  int64_t b = task->blocks * i / task->pieces, end = task->blocks * (i + 1) / task->pieces, before = 0;
  for (const Weight *w = task->weights; b < end; before += w->blocks, w++)
    for (; b < end && b - before < w->blocks; b++) w->block(&w->product, b - before);
}

// (x f32[S, D], active[S], then for each weight w f32 or bf16 [blocks, D, N], or code s8 [blocks, D, N] or u8 [blocks,
// D / 2, N] and scale f32[blocks, groups, N]) -> y f32[S, F] of each, 0 in rows that are not active.
XLA_FFI_Error *areax_blocked(XLA_FFI_CallFrame *frame) {
  if (asks_version(frame)) return NULL;
  const XLA_FFI_Buffer *x = argument(frame, 0), *active = argument(frame, 1);
  const int64_t S = x->dims[0], D = x->dims[1], count = frame->rets.size;
  int64_t rows[S], used = 0;
  Weight weights[count];
  for (int64_t s = 0; s < S; s++)
    if (((const uint8_t *)active->data)[s]) rows[used++] = s;
  Task task = {.weights = weights};
  int64_t outputs = 0;
  for (int64_t i = 0, at = 2; i < count; i++) {
    const XLA_FFI_Buffer *w = argument(frame, at++), *y = result(frame, i), *scale = NULL;
    if (w->dtype == XLA_FFI_DataType_S8 || w->dtype == XLA_FFI_DataType_U8) scale = argument(frame, at++);
    const int64_t F = y->dims[1], size = scale ? D / scale->dims[1] : GROUP;
    weights[i] = (Weight){{x->data, scale ? scale->data : NULL, w->data, y->data, rows, used, D, F, size},
                          w->dtype == XLA_FFI_DataType_F32    ? block_f32
                          : w->dtype == XLA_FFI_DataType_BF16 ? block_bf16
                          : w->dtype == XLA_FFI_DataType_S8   ? block_int8
                                                              : block_nf4,
                          w->dims[0]};
    task.blocks += w->dims[0], outputs += F;
    for (int64_t s = 0; s < S; s++)
      if (!((const uint8_t *)active->data)[s]) memset((float *)y->data + s * F, 0, F * sizeof(float));
  }
  const int64_t threads = used * D * outputs < SMALL ? 1 : threads_of(frame);
  task.pieces = threads < 2 ? 1 : task.blocks < 4 * threads ? task.blocks : 4 * threads;
  each_piece(frame, piece, &task, task.pieces, threads);
  return NULL;
}
