// y = x w^T for some rows x[S, D] and some weights, as a call of XLA on CPUs. Weights are read as they are kept, and
// widened to fp32, or multiplied in bf16 where rows are in bf16 too and the machine has tiles (tiles.h).
//
// Weights lie in blocks of N outputs, [F / N, D, N], so that N neighbouring numbers belong to as many sums; of bf16 and
// 4 bits, two entries of an output are neighbours. Each sum is over groups of entries in order, which may have scales:
// its bits depend neither on S nor on threads.

#include "call.h"
#include "tiles.h"

#define N 32  // outputs of a block
#define WIDE (2 * LANES)  // outputs at a time
#define SLAB 48          // rows whose sums stay in a core's cache
#define CHUNK 64         // entries whose weights stay there
#define KEPT (1 << 19)   // bytes of blocks that stay in its second cache
#define GROUP 64         // entries that are summed by themselves: long sums lose digits
#define SMALL (1 << 16)  // products that one thread computes sooner than others would come
#define AHEAD 8192       // bytes that are fetched ahead: without, a core waits for memory

typedef struct {
  int64_t row, size;  // rows row, ..., row + size - 1 of those that are active
} Tile;

typedef struct {
  const float *x;      // of each tile [D, size]
  const uint16_t *x16;  // bf16[rows + zeros, D], for tiles
  const float *scale;
  const char *w;
  float *y;
  const int64_t *rows;    // the active ones, then the others, whose results are 0
  const Tile *tiles;
  int64_t S, all;                  // the number of active rows, and of all
  int64_t D, F, size, tile_count;  // `size` entries are summed by themselves, and share a scale
} Product;

static const float nf4[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

// LANES entries of row d of a block, widened, from output n on.

static inline f32 wide_f32(const char *w, int64_t d, int n) { return *(const f32 *)(w + 4 * (d * N + n)); }

static inline f32 wide_bf16(const char *w, int64_t d, int n) {  // two rows share 32 bits: the lower half is the first's
  return (f32)((*(const u32 *)(w + 4 * (d / 2 * N + n)) << (d % 2 ? 0 : 16)) & 0xffff0000u);
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

// T rows times some entries of a block: `part` += x w, [T, N], and at a group's end `sum` += part x scale. Variables
// are named by row, so that compilers keep sums in registers.

typedef struct {
  const char *w, *ahead;  // of the entries' first; what is fetched meanwhile, `stride` bytes with each entry
  const float *scale;     // of the group; NULL = none
  int64_t stride, length;
  int first, last;  // of a group
} Chunk;

#define EACH1(M) M(0)
#define EACH2(M) EACH1(M) M(1)
#define EACH4(M) EACH2(M) M(2) M(3)
#define EACH6(M) EACH4(M) M(4) M(5)
#define EACH8(M) EACH6(M) M(6) M(7)
#define EACH12(M) EACH8(M) M(8) M(9) M(10) M(11)
#define BEGIN(t) f32 p##t = {0}, q##t = {0};
#define GO_ON(t) p##t = *(f32 *)(part + t * N + n), q##t = *(f32 *)(part + t * N + n + LANES);
#define ADD(t) p##t += x[at + t] * left, q##t += x[at + t] * right;
#define KEEP(t) *(f32 *)(part + t * N + n) = p##t, *(f32 *)(part + t * N + n + LANES) = q##t;
#define SCALE(t) \
  *(f32 *)(sum + t * N + n) += p##t * scale_left, *(f32 *)(sum + t * N + n + LANES) += q##t * scale_right;
#define TAKE(t) *(f32 *)(sum + t * N + n) += p##t, *(f32 *)(sum + t * N + n + LANES) += q##t;

#define TILE(T, KIND, BITS)                                                                                    \
  static void tile##T##_##KIND(                                                                                \
      const Chunk *chunk, const float *restrict x, float *restrict part, float *restrict sum) {                \
    const char *w = chunk->w, *ahead = chunk->ahead;                                                           \
    const int64_t length = chunk->length, stride = chunk->stride;                                              \
    for (int n = 0; n < N; n += WIDE) {                                                                        \
      EACH##T(BEGIN) if (!chunk->first) { EACH##T(GO_ON) }                                                     \
      for (int64_t d = 0, at = 0; d < length; d++, at += T) {                                                  \
        __builtin_prefetch(ahead + d * stride);                                                                \
        if (BITS == 32) __builtin_prefetch(ahead + d * stride + 64);                                           \
        f32 left = wide_##KIND(w, d, n), right = wide_##KIND(w, d, n + LANES);                                 \
        EACH##T(ADD)                                                                                           \
      }                                                                                                        \
      if (!chunk->last) {                                                                                      \
        EACH##T(KEEP)                                                                                          \
      } else if (chunk->scale) {                                                                               \
        f32 scale_left = *(const f32 *)(chunk->scale + n), scale_right = *(const f32 *)(chunk->scale + n + LANES); \
        EACH##T(SCALE)                                                                                         \
      } else {                                                                                                 \
        EACH##T(TAKE)                                                                                          \
      }                                                                                                        \
    }                                                                                                          \
  }

typedef void (*Multiply)(const Chunk *, const float *, float *, float *);

#if defined(__AVX512F__)  // as many rows as sums fit into registers
static const int sizes[] = {12, 8, 4, 2, 1};
#define TILES(KIND, BITS) \
  TILE(12, KIND, BITS) TILE(8, KIND, BITS) TILE(4, KIND, BITS) TILE(2, KIND, BITS) TILE(1, KIND, BITS)
#define ALL(KIND) {tile12_##KIND, tile8_##KIND, tile4_##KIND, tile2_##KIND, tile1_##KIND}
#else
static const int sizes[] = {6, 4, 2, 1};
#define TILES(KIND, BITS) TILE(6, KIND, BITS) TILE(4, KIND, BITS) TILE(2, KIND, BITS) TILE(1, KIND, BITS)
#define ALL(KIND) {tile6_##KIND, tile4_##KIND, tile2_##KIND, tile1_##KIND}
#endif

TILES(f32, 32) TILES(bf16, 16) TILES(int8, 8) TILES(nf4, 4)

static inline Multiply by_size(const Multiply *of_size, int64_t size) {
  int i = 0;
  while (sizes[i] != size) i++;
  return of_size[i];
}

// The rows of some tiles, a slab, times a block. Weights that several tiles need are widened once.
static inline void slab(
    const Product *p, int64_t block, const Tile *tiles, int64_t count, const Multiply *narrow, int bits,
    f32 (*widen)(const char *, int64_t, int)) {
  static const Multiply wide[] = ALL(f32);
  float part[SLAB * N], sum[SLAB * N] = {0}, copy[CHUNK * N];
  const int64_t D = p->D, bytes = N * bits / 8, start = tiles->row, groups = D / p->size;
  const char *w = p->w + block * (D * bytes);
  for (int64_t begin = 0, end; begin < D; begin = end) {
    const int64_t group = begin / p->size, group_end = (group + 1) * p->size < D ? (group + 1) * p->size : D;
    end = begin + CHUNK < group_end ? begin + CHUNK : group_end;
    const char *own = w + begin * N * bits / 8;
    Chunk chunk = {
        own, own + AHEAD, p->scale ? p->scale + (block * groups + group) * N : NULL, bytes, end - begin,
        begin == group * p->size, end == group_end};
    const Multiply *of_size = narrow;
    if (count > 1) {
      chunk.stride = (bytes + count - 1) / count, chunk.ahead = own + (end - begin) * bytes;
      if (bits != 32) {
        for (int64_t d = 0; d < end - begin; d++)
          for (int n = 0; n < N; n += LANES) *(f32 *)(copy + d * N + n) = widen(own, d, n);
        chunk.w = (const char *)copy, of_size = wide;
      }
    }
    for (const Tile *tile = tiles; tile < tiles + count; tile++) {
      const int64_t at = (tile->row - start) * N;
      by_size(of_size, tile->size)(&chunk, p->x + tile->row * D + begin * tile->size, part + at, sum + at);
      chunk.ahead += (end - begin) * chunk.stride;
    }
  }
  const Tile *last = tiles + count - 1;
  const int64_t room = p->F - block * N < N ? p->F - block * N : N;
  for (int64_t i = 0; i < last->row + last->size - start; i++)
    memcpy(p->y + p->rows[start + i] * p->F + block * N, sum + i * N, room * sizeof(float));
}

#define BLOCKS(KIND, BITS)                                                                          \
  static void blocks_##KIND(const Product *p, int64_t first, int64_t end) {                         \
    static const Multiply narrow[] = ALL(KIND);                                                     \
    for (int64_t i = 0, next; i < p->tile_count; i = next) {                                        \
      const int64_t limit = p->tiles[i].row + SLAB;                                                 \
      for (next = i; next < p->tile_count && p->tiles[next].row + p->tiles[next].size <= limit; next++) {} \
      for (int64_t block = first; block < end; block++)                                             \
        slab(p, block, p->tiles + i, next - i, narrow, BITS, wide_##KIND);                          \
    }                                                                                               \
  }

BLOCKS(f32, 32) BLOCKS(bf16, 16) BLOCKS(int8, 8) BLOCKS(nf4, 4)

static void blocks_tiles(const Product *p, int64_t first, int64_t end) {  // in bf16
  float sum[2 * TILE_ROWS * N];
  for (int64_t s = 0; s < p->S; s += 2 * TILE_ROWS) {
    const int64_t rows = p->S - s < 2 * TILE_ROWS ? p->S - s : 2 * TILE_ROWS;
    for (int64_t block = first; block < end; block++) {
      const int64_t room = p->F - block * N < N ? p->F - block * N : N;
      multiply_tiles(p->x16 + s * p->D, p->w + block * p->D * N * 2, p->D, rows, sum);
      for (int64_t i = 0; i < rows; i++)
        memcpy(p->y + p->rows[s + i] * p->F + block * N, sum + i * N, room * sizeof(float));
    }
  }
}

// Several threads pack rows by tiles, then compute the blocks of all weights.

typedef struct {
  const XLA_FFI_Buffer *x;
  const int64_t *rows;
  const Tile *tiles;
  float *packed;
  uint16_t *packed16;
} Rows;

static void pack(const void *data, int64_t i) {
  const Rows *rows = data;
  const int64_t D = rows->x->dims[1], size = rows->tiles[i].size;
  float *to = rows->packed + rows->tiles[i].row * D;
  if (rows->packed16)
    for (int64_t s = rows->tiles[i].row; s < rows->tiles[i].row + size; s++)
      memcpy(rows->packed16 + s * D, (const uint16_t *)rows->x->data + rows->rows[s] * D, D * sizeof(uint16_t));
  if (!rows->packed) return;
  for (int64_t t = 0; t < size; t++) {
    const int64_t row = rows->rows[rows->tiles[i].row + t] * D;
    const float *x = (const float *)rows->x->data + row;
    const uint16_t *x16 = (const uint16_t *)rows->x->data + row;
    if (rows->x->dtype == XLA_FFI_DataType_F32) {
      for (int64_t d = 0; d < D; d++) to[d * size + t] = x[d];
    } else {
      for (int64_t d = 0; d < D; d++) {
        const uint32_t bits = (uint32_t)x16[d] << 16;
        memcpy(to + d * size + t, &bits, 4);
      }
    }
  }
}

typedef struct {
  Product product;
  void (*multiply)(const Product *, int64_t first, int64_t end);
  int64_t blocks, together;  // how many, and of how many the weights stay in a core's cache
} Weight;

typedef struct {
  int64_t blocks, pieces;
  const Weight *weights;
  int tiles;
} Task;

// Zeroes what blocks first, ..., end - 1 give rows that are not active.
static void clear(const Product *p, int64_t first, int64_t end) {
  const int64_t begin = first * N, count = (end * N < p->F ? end * N : p->F) - begin;
  for (int64_t s = p->S; s < p->all; s++) memset(p->y + p->rows[s] * p->F + begin, 0, count * sizeof(float));
}

static void piece(const void *data, int64_t i) {
  const Task *task = data;
  int64_t b = task->blocks * i / task->pieces, end = task->blocks * (i + 1) / task->pieces, before = 0;
  if (task->tiles) use_tiles();
  for (const Weight *w = task->weights; b < end; before += w->blocks, w++)
    while (b < end && b - before < w->blocks) {
      const int64_t first = b - before, most = end - before < w->blocks ? end - before : w->blocks;
      const int64_t last = first + w->together < most ? first + w->together : most;
      w->multiply(&w->product, first, last);
      clear(&w->product, first, last);
      b = before + last;
    }
  if (task->tiles) leave_tiles();
}

// (x f32 or bf16 [S, D], active[S], then for each weight w f32 [blocks, D, N], u32 [blocks, D / 2, N] of two bf16, or
// code s8 [blocks, D, N] or u8 [blocks, D / 2, N] and scale f32[blocks, groups, N]) -> y f32[S, F] of each, 0 in rows
// that are not active.
XLA_FFI_Error *areax_blocked(XLA_FFI_CallFrame *frame) {
  if (asks_version(frame)) return NULL;
  const XLA_FFI_Buffer *x = argument(frame, 0), *active = argument(frame, 1);
  const int64_t S = x->dims[0], D = x->dims[1], count = frame->rets.size;
  int64_t rows[S], used = 0, tile_count = 0;
  Tile tiles[S];
  Weight weights[count];
  for (int64_t s = 0, idle = S; s < S; s++) {
    if (((const uint8_t *)active->data)[s]) rows[used++] = s;
    else rows[--idle] = s;
  }
  for (int64_t s = 0, i = 0; s < used; s += sizes[i], tile_count++) {
    while (s + sizes[i] > used) i++;
    tiles[tile_count] = (Tile){s, sizes[i]};
  }
  Task task = {.weights = weights};
  const int in_tiles = x->dtype == XLA_FFI_DataType_BF16 && D % TILE_ENTRIES == 0 && has_tiles();
  int64_t outputs = 0, others = 0;
  for (int64_t i = 0, at = 2; i < count; i++) {
    const XLA_FFI_Buffer *w = argument(frame, at++), *y = result(frame, i), *scale = NULL;
    if (w->dtype == XLA_FFI_DataType_S8 || w->dtype == XLA_FFI_DataType_U8) scale = argument(frame, at++);
    const int64_t F = y->dims[1], size = scale ? D / scale->dims[1] : GROUP;
    const int by_tiles = in_tiles && w->dtype == XLA_FFI_DataType_U32;
    const float *scales = scale ? scale->data : NULL;
    const int64_t bits = w->dtype == XLA_FFI_DataType_F32 ? 32 : w->dtype == XLA_FFI_DataType_U32 ? 16 : 8;
    const int64_t bytes = D * N * bits / 8;  // of a block, at most
    weights[i] = (Weight){{NULL, NULL, scales, w->data, y->data, rows, tiles, used, S, D, F, size, tile_count},
                          by_tiles                            ? blocks_tiles
                          : w->dtype == XLA_FFI_DataType_F32  ? blocks_f32
                          : w->dtype == XLA_FFI_DataType_U32  ? blocks_bf16
                          : w->dtype == XLA_FFI_DataType_S8   ? blocks_int8
                                                              : blocks_nf4,
                          w->dims[0], KEPT / bytes > 1 ? KEPT / bytes : 1};
    task.blocks += w->dims[0], outputs += F, task.tiles |= by_tiles, others |= !by_tiles;
  }
  const int64_t filled = task.tiles ? (used / (2 * TILE_ROWS) + 1) * (2 * TILE_ROWS) : 0;  // rows of x16
  float *packed = others ? malloc(used * D * sizeof(float)) : NULL;
  uint16_t *packed16 = task.tiles ? malloc(filled * D * sizeof(uint16_t)) : NULL;
  for (int64_t i = 0; i < count; i++) weights[i].product.x = packed, weights[i].product.x16 = packed16;
  if (task.tiles) memset(packed16 + used * D, 0, (filled - used) * D * sizeof(uint16_t));
  const int64_t threads = used * D * outputs < SMALL ? 1 : threads_of(frame);
  Rows own = {x, rows, tiles, packed, packed16};
  each_piece(frame, pack, &own, tile_count, used * D < SMALL ? 1 : threads);
  task.pieces = threads < 2 ? 1 : task.blocks < 4 * threads ? task.blocks : 4 * threads;
  each_piece(frame, piece, &task, task.pieces, threads);
  free(packed);
  free(packed16);
  return NULL;
}
