/* A mock of the driver's library, for tests of our side of it on machines without a GPU. It is no
   driver and no simulation of a GPU. Its device memory is the host's, its copies are complete when
   their call returns, and it knows few calls.

     -DSTUB      as a toolkit's stub: every call says 34
     -DANCIENT   a driver of CUDA 10.2
     -DNO_BATCH  as otherwise, without the calls that take many copies at once
     -DNEW       as otherwise, and streams can be waited for
     -DOLD_BATCH as otherwise, with the first of the two forms of that call
     -DNO_ROWS   as -DNO_BATCH, and without the call for rows at equal distances, too
     -DPINNED    as otherwise, with pinned host memory, waits of streams that tell of their ends,
                 and handles
     -DVMM       as otherwise, with memory that is made and mapped by itself, 64 MiB of it
     -DCOPIER    as otherwise, with kernels: there is one, the resident copier, which is a thread.
                 -DCOPIER=-N: on the GPU of that number, which all libraries of a process have that
                 say so. -DCOPIER=N, from 3 on: for processes that no test can reach into (alone.h)
     -DREADERS=1 as -DVMM, with access for reading only, which it keeps; others do not (readers.h)
     otherwise   one device; lacks many calls, answers with codes and types that no header has

   It counts the calls that a small copy, a wait, or an operation on them is made of: what each
   costs a program. */

#define _GNU_SOURCE
#ifdef READERS
#define VMM
#endif
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef STUB

int cuInit(unsigned flags) { return 34; }
int cuDriverGetVersion(int *version) { return 34; }
int cuDeviceGetCount(int *count) { return 34; }

#else

enum {
    INVALID_VALUE = 1,
    NOT_INITIALIZED = 3,
    DEINITIALIZED = 4,
    INVALID_CONTEXT = 201,
    NOT_READY = 600,
    UNHEARD_OF = 4242
};

static int inits, retained, gone, live_events, live_streams, live_allocations, ipc_opens, ipc_open;
static __thread void *stack[16];
static __thread int depth;

static struct {
    char *ptr;
    size_t len;
    unsigned long long id;
    int pinned, mapped, allowed;
} allocations[64];
static unsigned long long last_id = 100;

/* For the tests to look at, and to end the driver. */
int mock_inits(void) { return inits; }
int mock_depth(void) { return depth; }
int mock_enter(void) { return stack[depth++] = (void *)0xc0, 0; }
int mock_leave(void) { return --depth; }
int mock_retained(void) { return retained; }
int mock_events(void) { return live_events; }
int mock_streams(void) { return live_streams; }
int mock_allocations(void) { return live_allocations; }
int mock_go(void) { return gone = 1; }
int mock_opens(void) { return ipc_opens; }
int mock_open(void) { return ipc_open; }

/* Calls of each kind. Switches change the current context, `currents` ask for it, and
   `questions_of_what` ask for an address or a device. */
static int copies, records, queries, waits_given, switches, currents, questions_of_what;
int mock_copies(void) { return copies; }
int mock_records(void) { return records; }
int mock_queries(void) { return queries; }
int mock_waits(void) { return waits_given; }
int mock_switches(void) { return switches; }
int mock_currents(void) { return currents; }
int mock_questions(void) { return questions_of_what; }

/* Words that streams wait for; and calls that a driver would block in meanwhile. */
static struct {
    size_t stream;
    volatile long long *word;
    long long value;
    unsigned long long order;
    volatile unsigned long long *told;
    unsigned long long number;
} waits[64];
static int given, blocked;
/* Waits and records, in the order in which they were given. */
static unsigned long long order;
int mock_blocked(void) { return blocked; }

static int waits_on(int at) { return *waits[at].word - waits[at].value < 0; }

/* Streams that are past a wait write what they were given behind it: when the driver is next
   called. In their order, since a word has one stream. */
static void tell(void)
{
    for (int at = 0; at < given; at++) {
        if (!waits[at].told || waits_on(at))
            continue;
        if (*waits[at].told < waits[at].number)
            *waits[at].told = waits[at].number;
        waits[at].told = NULL;
    }
}

/* As if time had passed. */
int mock_tell(void) { return tell(), 0; }

static int any_waits(void)
{
    for (int at = 0; at < given; at++)
        if (waits_on(at))
            return 1;
    return 0;
}

/* The context that all memory lies in from now on; none, if no test has said so. */
static void *context_of_memory;
int mock_other_context(void) { return context_of_memory = (void *)0xc1, 0; }

/* Whether a thread captures a stream into a graph, in the global mode: it is spoilt by what threads
   do that mind it. */
static int captures, spoilt;
int mock_capture(void) { return spoilt = 0, captures = 1; }
int mock_capture_ends(void) { return captures = 0, spoilt; }

/* A thread's mode: global, of the thread, relaxed. */
static __thread int capture_mode;
int mock_capture_mode(void) { return capture_mode; }
int cuThreadExchangeStreamCaptureMode(int *mode)
{
    int before = capture_mode;
    if (*mode < 0 || *mode > 2)
        return 1;
    capture_mode = *mode, *mode = before;
    return 0;
}
/* The stream that is captured: the one that a test has said. */
static size_t captured_stream;
int mock_capture_stream(size_t stream) { return captured_stream = stream, 0; }
int cuStreamIsCapturing(size_t stream, int *status)
{
    return *status = captures && stream == captured_stream, 0;
}
#define UNCAPTURED                                                                                 \
    if (captures && capture_mode == 0)                                                             \
    return spoilt = 1, 900

#if COPIER > 2
#include "alone.h"
#else
#define NO_MEMORY 0
#define NO_COPIES 0
#endif

#define ALIVE                                                                                      \
    if (gone)                                                                                      \
    return DEINITIALIZED
#define IN_CONTEXT                                                                                 \
    ALIVE;                                                                                         \
    if (!depth)                                                                                    \
    return INVALID_CONTEXT

static int find(size_t ptr)
{
    for (int at = 0; at < 64; at++)
        if (allocations[at].ptr && ptr - (size_t)allocations[at].ptr < allocations[at].len)
            return at;
    return -1;
}

static int is_device(size_t ptr, size_t len)
{
    int at = find(ptr);
    if (at < 0 || allocations[at].pinned || allocations[at].mapped && !allocations[at].allowed)
        return 0;
    size_t end = (size_t)allocations[at].ptr + allocations[at].len;
    /* Across the border of what is mapped one behind the other. */
    return ptr + len <= end || allocations[at].mapped && is_device(end, ptr + len - end);
}

int cuDriverGetVersion(int *version)
{
#ifdef ANCIENT
    *version = 10020;
#else
    *version = 99000;
#endif
    return 0;
}

int cuInit(unsigned flags)
{
    inits++;
    return 0;
}

int cuDeviceGetCount(int *count)
{
    ALIVE;
    if (!inits)
        return NOT_INITIALIZED;
    *count = 1;
    return 0;
}

int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return 0;
}

int cuDeviceGetName(char *name, int len, int device)
{
    strncpy(name, "Mock", len);
    return 0;
}

/* Only the older name of this one. */
int cuDeviceGetUuid(char *uuid, int device)
{
    memset(uuid, 7, 16);
#if COPIER == 1
    /* Another GPU in each library. */
    static int own;
    int *place = &own;
    memcpy(uuid, &place, sizeof place);
#elif COPIER < 0
    /* Nor one of another run of the tests. */
    int shared[2] = {getpid(), COPIER};
    memcpy(uuid, shared, sizeof shared);
#elif COPIER > 2
    name_gpu(uuid);
#endif
    return 0;
}

int cuDeviceGetPCIBusId(char *id, int len, int device)
{
    /* As long as the place, and without an end. */
    memset(id, 'F', len);
    return 0;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    *bytes = 1 << 30;
    return 0;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    *flags = 0;
    *active = retained > 0;
    return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    ALIVE;
    UNCAPTURED;
    retained++;
    *context = (void *)0xc0;
    return 0;
}

int cuCtxGetCurrent(void **context)
{
    currents++;
    ALIVE;
    *context = depth ? stack[depth - 1] : NULL;
    return 0;
}

int cuCtxSetCurrent(void *context)
{
    switches++;
    ALIVE;
    depth -= depth > 0;
    stack[depth++] = context;
    return 0;
}

int cuCtxPushCurrent_v2(void *context)
{
    switches++;
    ALIVE;
    stack[depth++] = context;
    return 0;
}

int cuCtxPopCurrent_v2(void **context)
{
    switches++;
    ALIVE;
    *context = stack[--depth];
    return 0;
}

int cuCtxGetDevice(int *device)
{
    IN_CONTEXT;
    *device = 0;
    return 0;
}

int cuMemAlloc_v2(size_t *ptr, size_t len)
{
    IN_CONTEXT;
    UNCAPTURED;
    if (len > 1 << 30)
        return UNHEARD_OF;
    if (NO_MEMORY)
        return 2;
    for (int at = 0; at < 64; at++) {
        if (allocations[at].ptr)
            continue;
        if (posix_memalign((void **)&allocations[at].ptr, 2 << 20, len))
            return 2;
        allocations[at].len = len;
        allocations[at].id = ++last_id;
        allocations[at].pinned = allocations[at].mapped = 0;
        live_allocations++;
        *ptr = (size_t)allocations[at].ptr;
        return 0;
    }
    return 2;
}

int cuMemFree_v2(size_t ptr)
{
    IN_CONTEXT;
    UNCAPTURED;
    blocked += any_waits();
    int at = find(ptr);
    if (at < 0 || (size_t)allocations[at].ptr != ptr || allocations[at].mapped)
        return INVALID_VALUE;
    free(allocations[at].ptr);
    allocations[at].ptr = NULL;
    live_allocations--;
    return 0;
}

#ifdef VMM

enum { UNIT = 2 << 20, UNITS_OF_MEMORY = 32, NOT_PERMITTED = 800, OUT_OF_MEMORY = 2 };

/* Addresses that are reserved; and memory, which is there as long as its handle is, or a mapping of
   it. */
static struct {
    char *base;
    size_t len;
} reservations[16];
static struct {
    int fd;
    size_t len;
    int handles, mappings;
} memories[64];
static int live_reservations, live_memories, live_mappings, rules_broken, mappings_refused;
int mock_reservations(void) { return live_reservations; }
int mock_memories(void) { return live_memories; }
int mock_mappings(void) { return live_mappings; }
/* What the documentation forbids, and what no correct program does: to unmap a part, to give back
   addresses that are in use. */
int mock_rules_broken(void) { return rules_broken; }
int mock_refuse_access(void) { return mappings_refused = 1; }
int mock_allow_access(void) { return mappings_refused = 0; }

static int forbidden(void) { return rules_broken++, INVALID_VALUE; }

struct prop {
    int kind, handle_types, location, device;
};

int cuMemGetAllocationGranularity(size_t *bytes, const struct prop *prop, int option)
{
    ALIVE;
    if (prop->kind != 1 || prop->location != 1 || prop->device)
        return INVALID_VALUE;
    *bytes = UNIT;
    return 0;
}

int cuMemCreate(unsigned long long *handle, size_t len, const struct prop *prop,
                unsigned long long flags)
{
    ALIVE;
    UNCAPTURED;
    /* There is no fabric. */
    if (prop->handle_types & 8)
        return NOT_PERMITTED;
    if (!len || len % UNIT || flags || prop->device)
        return forbidden();
    size_t used = 0;
    int free = -1;
    for (int at = 0; at < 64; at++)
        if (memories[at].len)
            used += memories[at].len;
        else
            free = at;
    if (free < 0 || used + len > (size_t)UNIT * UNITS_OF_MEMORY)
        return OUT_OF_MEMORY;
    memories[free].fd = memfd_create("mock-memory", 1);
    if (memories[free].fd < 0 || ftruncate(memories[free].fd, len))
        return 304;
    memories[free].len = len;
    memories[free].handles = 1;
    memories[free].mappings = 0;
    live_memories++;
    *handle = free + 1;
    return 0;
}

/* Another process's: a file stands for it. */
int cuMemImportFromShareableHandle(unsigned long long *handle, void *from, int kind)
{
    ALIVE;
    struct stat found;
    if (kind != 1 || fstat((int)(size_t)from, &found) || !found.st_size)
        return INVALID_VALUE;
    for (int at = 0; at < 64; at++) {
        if (memories[at].len)
            continue;
        memories[at].fd = dup((int)(size_t)from);
        memories[at].len = found.st_size;
        memories[at].handles = 1;
        memories[at].mappings = 0;
        live_memories++;
        *handle = at + 1;
        return 0;
    }
    return OUT_OF_MEMORY;
}

static void settle(int at)
{
    if (memories[at].handles || memories[at].mappings)
        return;
    close(memories[at].fd);
    memories[at].len = 0;
    live_memories--;
}

int cuMemRelease(unsigned long long handle)
{
    ALIVE;
    int at = handle - 1;
    if (at < 0 || at > 63 || !memories[at].handles)
        return forbidden();
    memories[at].handles--;
    return settle(at), 0;
}

int cuMemAddressReserve(size_t *ptr, size_t len, size_t align, size_t at, unsigned long long flags)
{
    ALIVE;
    if (!len || len % UNIT || align & align - 1 || at || flags)
        return forbidden();
    for (int at = 0; at < 16; at++) {
        if (reservations[at].base)
            continue;
        char *base =
            mmap(NULL, len + UNIT, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base == MAP_FAILED)
            return OUT_OF_MEMORY;
        /* The rest stays mapped, which does no harm. */
        reservations[at].base = (char *)(((size_t)base + UNIT - 1) / UNIT * UNIT);
        reservations[at].len = len;
        live_reservations++;
        *ptr = (size_t)reservations[at].base;
        return 0;
    }
    return OUT_OF_MEMORY;
}

static int overlapping(size_t ptr, size_t len)
{
    for (int at = 0; at < 64; at++)
        if (allocations[at].ptr && ptr < (size_t)allocations[at].ptr + allocations[at].len &&
            (size_t)allocations[at].ptr < ptr + len)
            return at;
    return -1;
}

int cuMemAddressFree(size_t ptr, size_t len)
{
    ALIVE;
    for (int at = 0; at < 16; at++) {
        if ((size_t)reservations[at].base != ptr || reservations[at].len != len)
            continue;
        if (overlapping(ptr, len) >= 0)
            return forbidden();
        munmap((void *)ptr, len);
        reservations[at].base = NULL;
        live_reservations--;
        return 0;
    }
    return forbidden();
}

int cuMemMap(size_t ptr, size_t len, size_t offset, unsigned long long handle,
             unsigned long long flags)
{
    ALIVE;
    UNCAPTURED;
    int of = handle - 1, inside = 0;
    if (of < 0 || of > 63 || !memories[of].handles || offset || flags || ptr % UNIT)
        return forbidden();
    if (len != memories[of].len)
        return INVALID_VALUE;
    for (int at = 0; at < 16; at++)
        inside |= reservations[at].base && ptr >= (size_t)reservations[at].base &&
                  ptr + len <= (size_t)reservations[at].base + reservations[at].len;
    if (!inside || overlapping(ptr, len) >= 0)
        return INVALID_VALUE;
    for (int at = 0; at < 64; at++) {
        if (allocations[at].ptr)
            continue;
        if (mmap((void *)ptr, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memories[of].fd,
                 0) == MAP_FAILED)
            return 304;
        allocations[at].ptr = (char *)ptr;
        allocations[at].len = len;
        allocations[at].id = ++last_id;
        allocations[at].pinned = allocations[at].allowed = 0;
        allocations[at].mapped = handle;
        memories[of].mappings++;
        live_mappings++;
        return 0;
    }
    return OUT_OF_MEMORY;
}

int cuMemUnmap(size_t ptr, size_t len)
{
    ALIVE;
    UNCAPTURED;
    int at = find(ptr);
    if (at < 0 || !allocations[at].mapped || (size_t)allocations[at].ptr != ptr ||
        allocations[at].len != len)
        return forbidden();
    mmap((void *)ptr, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
         0);
    allocations[at].ptr = NULL;
    live_mappings--;
    int of = allocations[at].mapped - 1;
    memories[of].mappings--;
    return settle(of), 0;
}

struct access {
    int location, device, flags;
};

int cuMemSetAccess(size_t ptr, size_t len, const struct access *access, size_t count)
{
    ALIVE;
    UNCAPTURED;
    int at = find(ptr);
    if (at < 0 || (size_t)allocations[at].ptr != ptr || allocations[at].len != len || !count)
        return forbidden();
    for (size_t which = 0; which < count; which++)
        if (access[which].location != 1 || access[which].device ||
            access[which].flags != 3 && access[which].flags != 1)
            return forbidden();
    if (mappings_refused)
        return NOT_PERMITTED;
#ifdef READERS
    if (READERS == 4 && access->flags == 1)
        return NOT_PERMITTED;
#endif
    allocations[at].allowed = access[count - 1].flags;
    return 0;
}

#endif

/* Another process's memory, by a handle whose first byte is what the driver says to it. */
struct handle {
    unsigned char bytes[64];
};

int cuIpcOpenMemHandle_v2(size_t *ptr, struct handle handle, unsigned flags)
{
    IN_CONTEXT;
    UNCAPTURED;
    if (handle.bytes[0])
        return handle.bytes[0];
    ipc_opens++;
    ipc_open++;
    return cuMemAlloc_v2(ptr, 2 << 20);
}

int cuIpcCloseMemHandle(size_t ptr)
{
    IN_CONTEXT;
    UNCAPTURED;
    ipc_open--;
    return cuMemFree_v2(ptr);
}

/* Always the same for all devices: the host's address will do. */
int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    questions_of_what++;
    ALIVE;
    *value = 1;
#ifdef COPIER
    extern int mock_mode;
    /* CU_DEVICE_ATTRIBUTE_COMPUTE_MODE */
    if (attribute == 20)
        *value = mock_mode;
#endif
    return 0;
}

#ifdef PINNED

static int flushes;
int mock_flushes(void) { return flushes; }

/* A dma-buf of pages alone. */
int cuMemGetHandleForAddressRange(void *handle, size_t ptr, size_t len, int kind,
                                  unsigned long long flags)
{
    IN_CONTEXT;
    if (kind != 1 || flags || ptr % 4096 || len % 4096 || !len || !is_device(ptr, len))
        return INVALID_VALUE;
    int fd = memfd_create("mock-dmabuf", 0);
    if (fd < 0 || ftruncate(fd, len))
        return 304;
    *(int *)handle = fd;
    return 0;
}

int cuFlushGPUDirectRDMAWrites(int target, int scope)
{
    IN_CONTEXT;
    if (target != 0 || scope != 100)
        return INVALID_VALUE;
    flushes++;
    return 0;
}

int cuMemHostAlloc(void **ptr, size_t len, unsigned flags)
{
    IN_CONTEXT;
    UNCAPTURED;
    int refused = cuMemAlloc_v2((size_t *)ptr, len);
    if (!refused)
        allocations[find((size_t)*ptr)].pinned = 1;
    return refused;
}

int cuIpcGetMemHandle(void *handle, size_t ptr)
{
    IN_CONTEXT;
    UNCAPTURED;
    memset(handle, 0, 64);
    return is_device(ptr, 1) ? 0 : INVALID_VALUE;
}

int cuPointerSetAttribute(const void *value, int attribute, size_t ptr)
{
    ALIVE;
    UNCAPTURED;
    return is_device(ptr, 1) ? 0 : INVALID_VALUE;
}

int cuMemFreeHost(void *ptr) { return cuMemFree_v2((size_t)ptr); }

#endif

/* While this is set no work ends. */
static int held;
int mock_hold(void) { return held = 1; }
int mock_release(void) { return held = 0; }

/* A stream counts how often it has to be asked until it has done what it was given. */
static int questions[256];

static void give(size_t stream) { questions[stream & 0xff] = 2; }

#ifdef READERS
#include "readers.h"
#endif

int cuMemcpyHtoDAsync_v2(size_t dst, const void *src, size_t len, size_t stream)
{
    copies++;
    IN_CONTEXT;
    if (!is_device(dst, len))
        return INVALID_VALUE;
    memcpy((void *)dst, src, len);
    give(stream);
    return 0;
}

int cuMemcpyDtoHAsync_v2(void *dst, size_t src, size_t len, size_t stream)
{
    copies++;
    IN_CONTEXT;
    if (!is_device(src, len))
        return INVALID_VALUE;
    memcpy(dst, (void *)src, len);
    give(stream);
    return 0;
}

int cuMemcpyDtoDAsync_v2(size_t dst, size_t src, size_t len, size_t stream)
{
    copies++;
    IN_CONTEXT;
    if (!is_device(src, len) || !is_device(dst, len))
        return INVALID_VALUE;
    if (NO_COPIES)
        return 700;
#ifdef READERS
    if (READERS == 5 && !is_written(dst, len))
        abort();
    if (READERS == 8 && !is_written(dst, len))
        return 2;
    if (READERS != 2 && !is_written(dst, len))
        return INVALID_VALUE;
#endif
    memmove((void *)dst, (void *)src, len);
    give(stream);
    return 0;
}

/* Calls that took many copies, and that took rows; `copies` counts neither. */
static int batches, grids;
int mock_batches(void) { return batches; }
int mock_grids(void) { return grids; }

/* What a batch's call says: 0, or the code that a test has set. */
static int batch_says;
int mock_refuse_batches(void) { return batch_says = 801; }
int mock_break_batches(void) { return batch_says = 700; }

struct attributes {
    int order, src_kind, src_id, dst_kind, dst_id;
    unsigned flags;
};

/* The last operations of the legacy default stream and of another, a digit each.
   1: the legacy stream was recorded. 2: the other waits for the record. 3: the other takes a batch.
   4: the legacy stream waits for a record behind the batch. */
static int course;
static size_t another;
static unsigned long long batch_order;
int mock_course(void) { return course % 100000; }
static void note(int what) { course = course % 10000 * 10 + what; }

static int batch(const size_t *dsts, const size_t *srcs, const size_t *lens, size_t count,
                 const struct attributes *attributes, const size_t *begin, size_t sorts,
                 size_t *failed, size_t stream)
{
    batches++;
    IN_CONTEXT;
    if (stream >= 2 && stream == another)
        note(3), batch_order = order;
    if (batch_says)
        return batch_says;
    /* As the documentation has it: one sort at least, of which the first begins at the first copy;
       no legacy stream. */
    if (!count || sorts != 1 || begin[0] || attributes[0].order != 1 || stream < 2)
        return INVALID_VALUE;
    for (size_t at = 0; at < count; at++) {
        if (failed)
            *failed = at;
        if (!lens[at] || find(dsts[at]) < 0 || find(srcs[at]) < 0)
            return INVALID_VALUE;
    }
    /* In no order that a program could rely on. */
    for (size_t at = count; at-- > 0;)
        memmove((void *)dsts[at], (void *)srcs[at], lens[at]);
    give(stream);
    return 0;
}

#if !defined(NO_BATCH) && !defined(NO_ROWS)
#ifdef OLD_BATCH
int cuMemcpyBatchAsync(size_t *dsts, size_t *srcs, size_t *lens, size_t count,
                       struct attributes *attributes, size_t *begin, size_t sorts, size_t *failed,
                       size_t stream)
{
    return batch(dsts, srcs, lens, count, attributes, begin, sorts, failed, stream);
}
#else
int cuMemcpyBatchAsync_v2(size_t *dsts, size_t *srcs, size_t *lens, size_t count,
                          struct attributes *attributes, size_t *begin, size_t sorts, size_t stream)
{
    return batch(dsts, srcs, lens, count, attributes, begin, sorts, NULL, stream);
}
#endif
#endif

#ifndef NO_ROWS

/* The longest distance of rows that it takes. */
enum { MAX_PITCH = 1 << 20 };

struct rows2 {
    size_t x, y;
    unsigned type;
    size_t host, device, array, pitch;
};
struct copy2 {
    struct rows2 src, dst;
    size_t width, height;
};

static size_t address(unsigned type, size_t host, size_t device)
{
    return type == 1 ? host : device;
}

int cuMemcpy2DAsync_v2(const struct copy2 *copy, size_t stream)
{
    grids++;
    IN_CONTEXT;
    size_t from = address(copy->src.type, copy->src.host, copy->src.device);
    size_t to = address(copy->dst.type, copy->dst.host, copy->dst.device);
    if (copy->src.pitch > MAX_PITCH || copy->dst.pitch > MAX_PITCH)
        return INVALID_VALUE;
    if (copy->src.pitch < copy->width || copy->dst.pitch < copy->width)
        return INVALID_VALUE;
    if (find(from) < 0 || find(to) < 0)
        return INVALID_VALUE;
    for (size_t y = 0; y < copy->height; y++)
        memmove((char *)to + y * copy->dst.pitch, (char *)from + y * copy->src.pitch, copy->width);
    give(stream);
    return 0;
}

struct rows3 {
    size_t x, y, z, lod;
    unsigned type;
    size_t host, device, array, reserved, pitch, height;
};
struct copy3 {
    struct rows3 src, dst;
    size_t width, height, depth;
};

int cuMemcpy3DAsync_v2(const struct copy3 *copy, size_t stream)
{
    grids++;
    IN_CONTEXT;
    size_t from = address(copy->src.type, copy->src.host, copy->src.device);
    size_t to = address(copy->dst.type, copy->dst.host, copy->dst.device);
    if (copy->src.pitch > MAX_PITCH || copy->dst.pitch > MAX_PITCH)
        return INVALID_VALUE;
    if (copy->src.height < copy->height || copy->dst.height < copy->height)
        return INVALID_VALUE;
    if (find(from) < 0 || find(to) < 0)
        return INVALID_VALUE;
    for (size_t z = 0; z < copy->depth; z++)
        for (size_t y = 0; y < copy->height; y++)
            memmove((char *)to + (z * copy->dst.height + y) * copy->dst.pitch,
                    (char *)from + (z * copy->src.height + y) * copy->src.pitch, copy->width);
    give(stream);
    return 0;
}

#endif

int cuStreamCreate(size_t *stream, unsigned flags)
{
    IN_CONTEXT;
    UNCAPTURED;
    /* Non-blocking ones only. */
    if (flags != 1)
        return INVALID_VALUE;
    *stream = 0x1000 + ++live_streams;
    return 0;
}

#if defined NEW && !defined READERS
int cuStreamSynchronize(size_t stream)
{
    IN_CONTEXT;
    UNCAPTURED;
    questions[stream & 0xff] = 0;
    return 0;
}
#endif

int cuStreamDestroy_v2(size_t stream)
{
    IN_CONTEXT;
    live_streams--;
    /* It is destroyed, and what it says is for the caller to survive. */
    return UNHEARD_OF;
}

#ifdef COPIER
#include "copier.h"
#endif

int cuStreamQuery(size_t stream)
{
    queries++;
    IN_CONTEXT;
    UNCAPTURED;
#ifdef COPIER
    if (stream == COPIER_STREAM)
        return is_resident() ? NOT_READY : 0;
#endif
    tell();
    if (held)
        return NOT_READY;
    if (questions[stream & 0xff] == 0)
        return 0;
    --questions[stream & 0xff];
    return NOT_READY;
}

static int wait_for(size_t stream, size_t word, unsigned long long value, unsigned flags,
                    size_t told, unsigned long long number)
{
    /* Until it has reached the value, and no more than there are places for. */
    int at = 0;
    while (at < given && (waits_on(at) || waits[at].told))
        at++;
    if (flags != 0 || at == 64)
        return INVALID_VALUE;
    given += at == given;
    waits[at].stream = stream;
    waits[at].word = (volatile long long *)word;
    waits[at].value = value;
    waits[at].order = ++order;
    waits[at].told = (volatile unsigned long long *)told;
    waits[at].number = number;
    return 0;
}

int cuStreamWaitValue64_v2(size_t stream, size_t word, unsigned long long value, unsigned flags)
{
    waits_given++;
    IN_CONTEXT;
    return wait_for(stream, word, value, flags, 0, 0);
}

#ifdef PINNED

struct operation {
    unsigned what;
    size_t at;
    unsigned long long value;
    unsigned flags;
    size_t alias;
    unsigned long long pad;
};

/* A wait and the write of a word behind it, and nothing else. */
int cuStreamBatchMemOp_v2(size_t stream, unsigned count, struct operation *both, unsigned flags)
{
    waits_given++;
    IN_CONTEXT;
    tell();
    if (count != 2 || flags || both[0].what != 4 || both[1].what != 5)
        return INVALID_VALUE;
    return wait_for(stream, both[0].at, both[0].value, both[0].flags, both[1].at, both[1].value);
}

#endif

/* An event counts how often it has to be asked until it has fired, once its stream does not wait in
   front of it. */
struct event {
    int left;
    size_t stream;
    unsigned long long order;
};

/* As if there was no memory for another one. */
static int no_more_events;
int mock_refuse_events(void) { return no_more_events = 1; }
int mock_allow_events(void) { return no_more_events = 0; }

int cuEventCreate(struct event **event, unsigned flags)
{
    IN_CONTEXT;
    if (no_more_events)
        return 2;
    live_events++;
    *event = calloc(1, sizeof(struct event));
    return 0;
}

int cuEventRecord(struct event *event, size_t stream)
{
    records++;
    IN_CONTEXT;
    event->left = 2;
    event->stream = stream;
    event->order = ++order;
    if (stream < 2)
        note(1);
    return 0;
}

#ifdef NEW

/* Copies are complete when they are given, so no stream has to wait. */
int cuStreamWaitEvent(size_t stream, struct event *event, unsigned flags)
{
    IN_CONTEXT;
    if (flags)
        return INVALID_VALUE;
    if (stream >= 2 && event->stream < 2)
        note(2), another = stream;
    if (stream < 2 && event->stream == another && event->order > batch_order)
        note(4);
    return 0;
}

/* All streams are of one context. */
int cuStreamGetCtx(size_t stream, void **context)
{
    IN_CONTEXT;
    *context = (void *)0xc0;
    return 0;
}

#endif

int cuEventQuery(struct event *event)
{
    queries++;
    IN_CONTEXT;
    UNCAPTURED;
    tell();
    if (held)
        return NOT_READY;
    for (int at = 0; at < given; at++)
        if (waits[at].stream == event->stream && waits[at].order < event->order && waits_on(at))
            return NOT_READY;
    if (event->left == 0)
        return 0;
    --event->left;
    return NOT_READY;
}

int cuEventSynchronize(struct event *event)
{
    IN_CONTEXT;
    UNCAPTURED;
    event->left = 0;
    return 0;
}

int cuPointerGetAttribute(unsigned long long *data, int attribute, size_t ptr)
{
    questions_of_what++;
    ALIVE;
    int at = find(ptr);
    if (attribute != 7 || at < 0)
        return INVALID_VALUE;
    *data = allocations[at].id;
    return 0;
}

/* Knows eight attributes of a pointer, and no more. What was allocated is device memory.
   0x900000 is memory of a type that is not known. 0xa00000 belongs to a device that is not visible.
   All else is the host's. */
int cuPointerGetAttributes(unsigned count, const int *attributes, void **data, size_t ptr)
{
    questions_of_what++;
    ALIVE;
    if (!inits)
        return NOT_INITIALIZED;
    if (count > 8)
        return INVALID_VALUE;
    int at = find(ptr);
    for (unsigned which = 0; which < count; which++) {
        switch (attributes[which]) {
        case 1:
            if (context_of_memory)
                *(void **)data[which] = at >= 0 ? context_of_memory : NULL;
            break;
        case 2:
            *(unsigned *)data[which] = at >= 0 && allocations[at].pinned ? 1
                                       : at >= 0 || ptr == 0xa00000      ? 2
                                       : ptr == 0x900000                 ? 77
                                                                         : 0;
            break;
        case 9:
            *(int *)data[which] = ptr == 0xa00000 ? 5 : at >= 0 || ptr == 0x900000 ? 0 : -2;
            break;
        case 7:
            *(unsigned long long *)data[which] = at >= 0 ? allocations[at].id : 0;
            break;
        case 11:
            *(size_t *)data[which] = at >= 0 ? (size_t)allocations[at].ptr : 0;
            break;
        case 12:
            *(size_t *)data[which] = at >= 0 ? allocations[at].len : 0;
            break;
#ifdef PINNED
        case 10:
            *(int *)data[which] = at >= 0 && !allocations[at].pinned;
            break;
#endif
        default:
            break;
        }
    }
    return 0;
}

#endif
