/* The copy engine's side of `cargo xtask bench-peers`: raw calls of NVIDIA's driver, one test, one
 * line of JSON.
 *
 *     copy_bench latency|bandwidth|rate SIZE ITERATIONS [push|pull]
 *     copy_bench devices
 *
 * Memory of device 0 is copied to memory of device 1, or of device 0 where there is no other. The
 * call is cuMemcpyDtoDAsync on one non-blocking stream. By a stream of device 0 its engine writes
 * over the link (push, as a put does). By one of device 1 its engine reads (pull, as a get does).
 *
 * latency    each copy waited for by cuStreamSynchronize; the median and the mean, in microseconds.
 * bandwidth  ITERATIONS copies back to back, then one wait.
 * rate       the same; the other figure of the two is meant.
 * devices    prints how many there are, and nothing else.
 *
 * The driver is opened when this runs: it is built on machines that have none. Without devices the
 * status is 3.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { NO_DEVICES = 3, NON_BLOCKING = 1, ALREADY_ENABLED = 704 };

typedef uint64_t device_memory;

static void *library;

static void give_up(int status, const char *what, int code)
{
    fprintf(stderr, "copy_bench: %s (%d)\n", what, code);
    exit(status);
}

static void *call(const char *name)
{
    void *found = dlsym(library, name);
    if (found == NULL)
        give_up(2, name, 0);
    return found;
}

static void check(int code, const char *what)
{
    if (code != 0)
        give_up(2, what, code);
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

static int by_size(const void *one, const void *other)
{
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

int main(int count, char **words)
{
    int is_question = count == 2 && strcmp(words[1], "devices") == 0;
    int is_pulled = count == 5 && strcmp(words[4], "pull") == 0;
    int is_pushed = count == 4 || (count == 5 && strcmp(words[4], "push") == 0);
    if (!is_pulled && !is_pushed && !is_question)
        give_up(2, "expected: latency|bandwidth|rate SIZE ITERATIONS [push|pull]", count);
    const char *test = words[1];
    size_t size = is_question ? 1 : strtoul(words[2], NULL, 10);
    long iterations = is_question ? 1 : strtol(words[3], NULL, 10);
    if (size == 0 || iterations < 1)
        give_up(2, "SIZE and ITERATIONS are numbers above 0", 0);

    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL)
        give_up(NO_DEVICES, dlerror(), 0);
    int (*init)(unsigned) = call("cuInit");
    int (*device_count)(int *) = call("cuDeviceGetCount");
    int (*retain)(void **, int) = call("cuDevicePrimaryCtxRetain");
    int (*set_current)(void *) = call("cuCtxSetCurrent");
    int (*enable)(void *, unsigned) = call("cuCtxEnablePeerAccess");
    int (*allocate)(device_memory *, size_t) = call("cuMemAlloc_v2");
    int (*make_stream)(void **, unsigned) = call("cuStreamCreate");
    int (*copy)(device_memory, device_memory, size_t, void *) = call("cuMemcpyDtoDAsync_v2");
    int (*synchronize)(void *) = call("cuStreamSynchronize");

    int devices = 0;
    int found = init(0);
    if (found != 0 || (found = device_count(&devices)) != 0 || devices == 0)
        give_up(NO_DEVICES, "no devices", found);
    if (is_question) {
        printf("%d\n", devices);
        return 0;
    }
    void *near = NULL, *far = NULL, *stream = NULL;
    device_memory from = 0, to = 0;
    check(retain(&far, devices > 1), "cuDevicePrimaryCtxRetain");
    check(set_current(far), "cuCtxSetCurrent");
    check(allocate(&to, size), "cuMemAlloc");
    check(retain(&near, 0), "cuDevicePrimaryCtxRetain");
    check(set_current(near), "cuCtxSetCurrent");
    check(allocate(&from, size), "cuMemAlloc");
    if (is_pulled)
        check(set_current(far), "cuCtxSetCurrent");
    if (devices > 1) {
        int enabled = enable(is_pulled ? near : far, 0);
        if (enabled != ALREADY_ENABLED)
            check(enabled, "cuCtxEnablePeerAccess");
    }
    check(make_stream(&stream, NON_BLOCKING), "cuStreamCreate");

    for (int warm_up = 0; warm_up < 100; warm_up++) {
        check(copy(to, from, size, stream), "cuMemcpyDtoDAsync");
        check(synchronize(stream), "cuStreamSynchronize");
    }
    if (strcmp(test, "latency") == 0) {
        double *times = malloc((size_t)iterations * sizeof *times);
        if (times == NULL)
            give_up(2, "no memory for the times", 0);
        double begin = now();
        for (long turn = 0; turn < iterations; turn++) {
            double one = now();
            check(copy(to, from, size, stream), "cuMemcpyDtoDAsync");
            check(synchronize(stream), "cuStreamSynchronize");
            times[turn] = now() - one;
        }
        double mean = (now() - begin) / (double)iterations;
        qsort(times, (size_t)iterations, sizeof *times, by_size);
        printf("{\"test\":\"latency\",\"size\":%zu,\"latency_us\":{\"p50\":%.4f,\"mean\":%.4f}}\n",
               size, times[iterations / 2], mean);
    } else {
        double begin = now();
        for (long turn = 0; turn < iterations; turn++)
            check(copy(to, from, size, stream), "cuMemcpyDtoDAsync");
        check(synchronize(stream), "cuStreamSynchronize");
        double rate = (double)iterations / (now() - begin);
        printf("{\"test\":\"%s\",\"size\":%zu,\"bandwidth_gbps\":%.6f,\"rate_mps\":%.6f}\n", test,
               size, rate * (double)size / 1e3, rate);
    }
    return 0;
}
