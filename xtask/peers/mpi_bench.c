/* MPI's side of `cargo xtask bench-peers`: one test, one line of JSON.
 *
 *     mpiexec -n 2 mpi_bench latency|bandwidth|rate|barrier SIZE ITERATIONS [THREADS]
 *     mpi_bench memcpy SIZE ITERATIONS
 *
 * latency    ping-pong; ITERATIONS round trips. Percentiles are of all round trips, halved: one
 *            way, in microseconds.
 * bandwidth  windows of 64 messages, each acknowledged, up to 4 in flight, as `carrack perf` does
 *            it. Timed until the last is acknowledged; ITERATIONS is rounded up to whole windows.
 * rate       the same; the other figure of the two is meant.
 * barrier    ITERATIONS barriers of all ranks; percentiles of rank 0, in microseconds, not halved.
 *            SIZE means nothing.
 * memcpy     no MPI: ITERATIONS copies from one buffer into one other by one thread.
 *
 * With THREADS above 1 bandwidth and rate are under MPI_THREAD_MULTIPLE. Each thread of rank 0
 * sends ITERATIONS messages to its partner at rank 1, over a communicator of their own. Each runs
 * on a CPU of its own: the first of those that its process may use, the second, and so on. Figures
 * are of all threads.
 *
 * The line has the fields of `carrack perf --json`: bandwidth_gbps counts 10^9 bytes a second,
 * rate_mps 10^6 messages.
 */
#define _GNU_SOURCE
#include <mpi.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { WINDOW = 64, WINDOWS = 4, PAYLOAD = 1, ACK = 2, MOST_THREADS = 64 };

struct job {
    int rank;
    int peer;
    int size;
    long iterations;
    int threads;
    /* Which of them this one is for. */
    int thread;
    MPI_Comm comm;
    char *out;
    char *in;
    /* Messages a second. */
    double rate;
};

static void give_up(const char *why)
{
    fprintf(stderr, "mpi_bench: %s\n", why);
    int has_begun = 0;
    MPI_Initialized(&has_begun);
    if (has_begun)
        MPI_Abort(MPI_COMM_WORLD, 2);
    exit(2);
}

static void *pages(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *memory = NULL;
    if (posix_memalign(&memory, page, (bytes / page + 1) * page) != 0)
        give_up("no memory for the buffers");
    /* Touched before anything is timed, so that no page of it is the kernel's shared zero page. */
    memset(memory, 0x5a, bytes);
    return memory;
}

/* A clock that costs as little as the one that the other sides use; its unit is known only after
 * the run. */
static inline uint64_t ticks(void)
{
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#else
    return (uint64_t)(MPI_Wtime() * 1e9);
#endif
}

static int ascending(const void *left, const void *right)
{
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

static void one_round_trip(const struct job *job)
{
    if (job->rank == 0) {
        MPI_Send(job->out, job->size, MPI_BYTE, job->peer, PAYLOAD, MPI_COMM_WORLD);
        MPI_Recv(job->in, job->size, MPI_BYTE, job->peer, PAYLOAD, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
    } else {
        MPI_Recv(job->in, job->size, MPI_BYTE, job->peer, PAYLOAD, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
        MPI_Send(job->out, job->size, MPI_BYTE, job->peer, PAYLOAD, MPI_COMM_WORLD);
    }
}

static void one_barrier(const struct job *job)
{
    (void)job;
    MPI_Barrier(MPI_COMM_WORLD);
}

/* Times each repetition; `share` is the part of one that counts: half of a round trip, all of a
 * barrier. */
static void repeat(const struct job *job, const char *name, void (*step)(const struct job *),
                   double share)
{
    long count = job->iterations;
    uint64_t *took = pages((size_t)count * sizeof *took);
    for (long i = 0; i < count / 10 + 1; i++)
        step(job);
    MPI_Barrier(MPI_COMM_WORLD);

    double began = MPI_Wtime();
    uint64_t first = ticks(), last = first;
    for (long i = 0; i < count; i++) {
        step(job);
        uint64_t now = ticks();
        took[i] = now - last;
        last = now;
    }
    double seconds = MPI_Wtime() - began;
    if (job->rank != 0)
        return;

    double us = last > first ? seconds * 1e6 / (double)(last - first) * share : 0.0;
    qsort(took, (size_t)count, sizeof *took, ascending);
    printf("{\"test\":\"%s\",\"size\":%d,\"iterations\":%ld,\"latency_us\":{\"min\":%.5f,\"mean\":%"
           ".5f,"
           "\"p50\":%.5f,\"p99\":%.5f,\"max\":%.5f},\"bandwidth_gbps\":null,\"rate_mps\":null}\n",
           name, job->size, count, us * (double)took[0], seconds * 1e6 * share / (double)count,
           us * (double)took[count / 2], us * (double)took[count - 1 - count / 100],
           us * (double)took[count - 1]);
}

static void send_windows(const struct job *job, long windows)
{
    MPI_Request sends[WINDOWS][WINDOW], acks[WINDOWS];
    for (long w = 0; w < windows + WINDOWS; w++) {
        int lane = (int)(w % WINDOWS);
        if (w >= WINDOWS && w - WINDOWS < windows) {
            MPI_Waitall(WINDOW, sends[lane], MPI_STATUSES_IGNORE);
            MPI_Wait(&acks[lane], MPI_STATUS_IGNORE);
        }
        if (w >= windows)
            continue;
        MPI_Irecv(NULL, 0, MPI_BYTE, job->peer, ACK, job->comm, &acks[lane]);
        for (int i = 0; i < WINDOW; i++)
            MPI_Isend(job->out, job->size, MPI_BYTE, job->peer, PAYLOAD, job->comm,
                      &sends[lane][i]);
    }
}

static void post_window(const struct job *job, MPI_Request *receives)
{
    for (int i = 0; i < WINDOW; i++)
        MPI_Irecv(job->in, job->size, MPI_BYTE, job->peer, PAYLOAD, job->comm, &receives[i]);
}

static void receive_windows(const struct job *job, long windows)
{
    MPI_Request receives[WINDOWS][WINDOW];
    for (long w = 0; w < WINDOWS && w < windows; w++)
        post_window(job, receives[w]);
    for (long w = 0; w < windows; w++) {
        MPI_Request *window = receives[w % WINDOWS];
        MPI_Waitall(WINDOW, window, MPI_STATUSES_IGNORE);
        /* Posted before the window is acknowledged: a message of a timed window is never
         * unexpected. */
        if (w + WINDOWS < windows)
            post_window(job, window);
        MPI_Send(NULL, 0, MPI_BYTE, job->peer, ACK, job->comm);
    }
}

/* The CPU of this number among those that the process may use. */
static void run_on_own_cpu(int number)
{
    cpu_set_t allowed, own;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        give_up("sched_getaffinity");
    CPU_ZERO(&own);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &allowed) && number-- == 0)
            CPU_SET(cpu, &own);
    if (CPU_COUNT(&own) != 1)
        give_up("a thread has no CPU of its own");
    if (pthread_setaffinity_np(pthread_self(), sizeof own, &own) != 0)
        give_up("pthread_setaffinity_np");
}

static void *stream_of_one(void *argument)
{
    struct job *job = argument;
    void (*side)(const struct job *, long) = job->rank == 0 ? send_windows : receive_windows;
    long windows = (job->iterations + WINDOW - 1) / WINDOW;
    if (job->threads > 1)
        run_on_own_cpu(job->thread);
    side(job, windows / 10 + 1);
    MPI_Barrier(job->comm);

    double began = MPI_Wtime();
    side(job, windows);
    job->rate = (double)(windows * WINDOW) / (MPI_Wtime() - began);
    return NULL;
}

static void stream(const struct job *job, const char *name)
{
    static struct job jobs[MOST_THREADS];
    pthread_t threads[MOST_THREADS];
    for (int t = 0; t < job->threads; t++) {
        jobs[t] = *job;
        jobs[t].thread = t;
        if (job->threads > 1) {
            MPI_Comm_dup(MPI_COMM_WORLD, &jobs[t].comm);
            jobs[t].out = pages((size_t)job->size);
            jobs[t].in = pages((size_t)job->size);
        }
    }
    if (job->threads == 1)
        stream_of_one(&jobs[0]);
    else {
        for (int t = 0; t < job->threads; t++)
            if (pthread_create(&threads[t], NULL, stream_of_one, &jobs[t]) != 0)
                give_up("a thread cannot be started");
        for (int t = 0; t < job->threads; t++)
            pthread_join(threads[t], NULL);
    }
    double rate = 0.0;
    for (int t = 0; t < job->threads; t++)
        rate += jobs[t].rate;
    if (job->rank == 0)
        printf("{\"test\":\"%s\",\"size\":%d,\"threads\":%d,\"iterations\":%ld,\"latency_us\":null,"
               "\"bandwidth_gbps\":%.5f,\"rate_mps\":%.5f}\n",
               name, job->size, job->threads, job->iterations, rate * job->size / 1e9, rate / 1e6);
}

/* Copies as a library would do them; the compiler is told that the bytes are read. */
static void copies(const struct job *job)
{
    struct timespec began, ended;
    for (long i = -(job->iterations / 10 + 1); i < job->iterations; i++) {
        if (i == 0)
            clock_gettime(CLOCK_MONOTONIC, &began);
        memcpy(job->in, job->out, (size_t)job->size);
        __asm__ volatile("" : : "r"(job->in), "r"(job->out) : "memory");
    }
    clock_gettime(CLOCK_MONOTONIC, &ended);
    double seconds =
        (double)(ended.tv_sec - began.tv_sec) + (double)(ended.tv_nsec - began.tv_nsec) * 1e-9;
    double rate = (double)job->iterations / seconds;
    printf("{\"test\":\"bandwidth\",\"size\":%d,\"iterations\":%ld,\"latency_us\":null,"
           "\"bandwidth_gbps\":%.5f,\"rate_mps\":%.5f}\n",
           job->size, job->iterations, rate * job->size / 1e9, rate / 1e6);
}

int main(int argc, char **argv)
{
    struct job job = {.threads = 1};
    int ranks, level, is_copy = argc > 1 && strcmp(argv[1], "memcpy") == 0;
    if (argc == 5)
        job.threads = atoi(argv[4]);
    int wanted = job.threads > 1 ? MPI_THREAD_MULTIPLE : MPI_THREAD_SINGLE;
    if (!is_copy) {
        MPI_Init_thread(&argc, &argv, wanted, &level);
        MPI_Comm_rank(MPI_COMM_WORLD, &job.rank);
        MPI_Comm_size(MPI_COMM_WORLD, &ranks);
        job.comm = MPI_COMM_WORLD;
        if (level < wanted)
            give_up("this MPI has no MPI_THREAD_MULTIPLE");
    }
    if (argc != 4 && argc != 5)
        give_up("three or four arguments, please: latency|bandwidth|rate|barrier|memcpy SIZE "
                "ITERATIONS [THREADS]");
    const char *test = argv[1];
    long size = atol(argv[2]);
    job.iterations = atol(argv[3]);
    if (size < 0 || size > 1L << 30 || job.iterations < 1)
        give_up("SIZE is from 0 to 2^30, and ITERATIONS at least 1");
    int is_barrier = strcmp(test, "barrier") == 0;
    int is_stream = strcmp(test, "bandwidth") == 0 || strcmp(test, "rate") == 0;
    if (job.threads < 1 || job.threads > (is_stream ? MOST_THREADS : 1))
        give_up("THREADS is from 1 to 64 for bandwidth and rate, and 1 for all others");
    if (!is_copy && !is_barrier && ranks != 2)
        give_up("this test is between two ranks: start it with -n 2");
    job.peer = 1 - job.rank;
    job.size = (int)size;
    job.out = pages((size_t)size);
    job.in = pages((size_t)size);

    if (is_copy) {
        copies(&job);
        return 0;
    }
    if (is_barrier)
        repeat(&job, test, one_barrier, 1.0);
    else if (strcmp(test, "latency") == 0)
        repeat(&job, test, one_round_trip, 0.5);
    else if (is_stream)
        stream(&job, test);
    else
        give_up("this test is unknown: there are latency, bandwidth, rate, barrier and memcpy");
    MPI_Finalize();
    return 0;
}
