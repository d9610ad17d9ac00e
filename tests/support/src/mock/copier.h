/* The resident copier on a driver that is mocked: a thread that reads the page as the kernel does.
   The layout is that of `gpu/cuda/copier.ptx`. The test takes the part of the kernel's clock. */

#include <pthread.h>
#include <stdio.h>
#include <time.h>

enum { COPIER_STREAM = 0x2001, SHEETS = 4, LINES = 4 };

struct page {
    volatile unsigned long long sheets[SHEETS][LINES][8];
    volatile unsigned long long answered, begun, leaving, gone;
};

int mock_mode;
static int lists, jit_code, launch_code, launches, unloads, unregistered, dies, times_out;
static volatile int resident;
static unsigned long long registered;

/* For the tests: what the driver says to the kernel's text and to its launch, and what becomes of
   the kernel. */
int mock_exclusive(void) { return mock_mode = 3; }
int mock_no_jit(void) { return jit_code = 222; }
int mock_no_launch(void) { return launch_code = 719; }
int mock_dies(void) { return dies = 1; }
int mock_times_out(void) { return times_out = 1; }
int mock_launches(void) { return launches; }
int mock_lists(void) { return lists; }
int mock_unloads(void) { return unloads; }
int mock_unregistered(void) { return unregistered; }

/* What devices may do with memory of no context: all, until a test says nothing. */
static unsigned long long rights = 3;
static int rights_asked;
int mock_rights_asked(void) { return rights_asked; }
int mock_revoke(void) { return rights = 0; }
int cuMemGetAccess(unsigned long long *flags, const int *location, size_t ptr)
{
    ALIVE;
    UNCAPTURED;
    rights_asked++;
    *flags = rights;
    return location[0] == 1 && find(ptr) >= 0 ? 0 : INVALID_VALUE;
}

/* A kernel's clock, where no test is one. */
static unsigned long long now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ull + time.tv_nsec;
}
static int is_past(unsigned long long begun) { return COPIER > 2 && now() - begun > 3000000; }

static int is_resident(void) { return resident; }

struct launch {
    struct page *page;
    unsigned long long generation;
};

/* Whether there was a command of that number, each of whose words has come to one of the sheets. */
static int take(struct page *page, int sheets, unsigned long long number)
{
    unsigned long long piece[5];
    for (int at = 0; at < 5; at++) {
        int sheet = 0;
        for (; sheet < sheets; sheet++) {
            unsigned long long word =
                __atomic_load_n(&page->sheets[sheet][number % LINES][at], __ATOMIC_ACQUIRE);
            piece[at] = word & 0xffffffff;
            if (word >> 32 == (number & 0xffffffff))
                break;
        }
        if (sheet == sheets)
            return 0;
    }
    unsigned long long dst = piece[1] << 32 | piece[0], src = piece[3] << 32 | piece[2],
                       len = piece[4];
    if (len >> 31) {
        /* Many: the source is their list, behind the page, one for each line. */
        if (src != registered + 4096 + number % LINES * 16384 || dst)
            abort();
        lists++;
        for (unsigned long long *one = (void *)src, *end = one + 2 * (len & 0x7fffffff); one < end;
             one += 2)
            memmove((void *)(one[0] & 0x1fffffffffffff), (void *)one[1], one[0] >> 53);
    } else {
        memmove((void *)dst, (void *)src, len);
    }
    __atomic_store_n(&page->answered, number, __ATOMIC_RELEASE);
    return 1;
}

static void *run(void *given)
{
    struct launch launch = *(struct launch *)given;
    free(given);
    struct page *page = launch.page;
    unsigned long long next = page->answered + 1;
    __atomic_store_n(&page->begun, launch.generation, __ATOMIC_RELEASE);
    unsigned long long begun = now();
    while (!times_out && !is_past(begun) && page->sheets[SHEETS - 1][0][7] != launch.generation) {
        if (dies && page->sheets[0][next % LINES][0] >> 32 == (next & 0xffffffff))
            return resident = 0, NULL;
        if (take(page, SHEETS, next))
            next++;
        else
            sched_yield();
    }
    __atomic_store_n(&page->leaving, launch.generation, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    while (take(page, 1, next))
        next++;
    resident = times_out = 0;
    __atomic_store_n(&page->gone, launch.generation, __ATOMIC_RELEASE);
    return NULL;
}

int cuMemHostRegister_v2(void *ptr, size_t len, unsigned flags)
{
    IN_CONTEXT;
    UNCAPTURED;
    if ((size_t)ptr % 4096 || len != 4096 + LINES * 16384 || flags != 3)
        return INVALID_VALUE;
    registered = (size_t)ptr;
    return 0;
}

int cuMemHostUnregister(void *ptr)
{
    IN_CONTEXT;
    UNCAPTURED;
    unregistered += (size_t)ptr == registered;
    return 0;
}

int cuMemHostGetDevicePointer_v2(size_t *device, void *host, unsigned flags)
{
    IN_CONTEXT;
    UNCAPTURED;
    *device = (size_t)host;
    return (size_t)host == registered ? 0 : INVALID_VALUE;
}

int cuModuleLoadData(size_t *module, const char *text)
{
    IN_CONTEXT;
    UNCAPTURED;
    *module = 0x70;
    return strstr(text, ".visible .entry carrack_copier(") ? jit_code : 218;
}

int cuModuleUnload(size_t module)
{
    IN_CONTEXT;
    UNCAPTURED;
    unloads++;
    return module == 0x70 ? 0 : INVALID_VALUE;
}

int cuModuleGetFunction(size_t *function, size_t module, const char *name)
{
    IN_CONTEXT;
    *function = 0x71;
    return module == 0x70 && !strcmp(name, "carrack_copier") ? 0 : 500;
}

int cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    IN_CONTEXT;
    *least = 0;
    *greatest = -5;
    return 0;
}

int cuStreamCreateWithPriority(size_t *stream, unsigned flags, int priority)
{
    IN_CONTEXT;
    *stream = COPIER_STREAM;
    return flags == 1 && priority == -5 ? 0 : INVALID_VALUE;
}

int cuLaunchKernel(size_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, size_t stream, unsigned long long **arguments,
                   void **extra)
{
    IN_CONTEXT;
    /* One block, on the stream of its own, behind no other, for 1 and 3 ms. */
    if (function != 0x71 || gx * gy * gz != 1 || bx != 640 || by * bz != 1 || shared ||
        stream != COPIER_STREAM || extra)
        return 1;
    if (arguments[0][0] != registered || arguments[2][0] != 1000000 || arguments[3][0] != 3000000 ||
        resident)
        return 1;
    if (launch_code && launches)
        return launch_code;
    launches++;
    struct launch *launch = malloc(sizeof *launch);
    launch->page = (struct page *)arguments[0][0];
    launch->generation = arguments[1][0];
    resident = 1;
    pthread_t thread;
    if (pthread_create(&thread, NULL, run, launch))
        return 304;
    return pthread_detach(thread), 0;
}
