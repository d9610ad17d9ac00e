/* MPI's side of `cargo xtask bench-peers`: one test of two ranks, one line of JSON.
 *
 *     mpiexec -n 2 mpi_bench latency|bandwidth|rate|barrier SIZE ITERATIONS
 *
 * latency    ping-pong; ITERATIONS round trips. Percentiles are of all round trips, halved: one way, in microseconds.
 * bandwidth  windows of 64 messages, each acknowledged, up to 4 under way, timed until the last is acknowledged, as
 *            `carrack perf` does it; ITERATIONS messages, rounded up to whole windows.
 * rate       the same; the other figure of the two is meant.
 * barrier    ITERATIONS barriers of all ranks; percentiles of rank 0, in microseconds, not halved. SIZE means nothing.
 *
 * The line has the fields of `carrack perf --json`: bandwidth_gbps counts 10^9 bytes a second, rate_mps 10^6 messages.
 */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { WINDOW = 64, WINDOWS = 4, PAYLOAD = 1, ACK = 2 };

struct job {
    int rank;
    int peer;
    int size;
    long iterations;
    char *out;
    char *in;
};

static void give_up(const char *why)
{
    fprintf(stderr, "mpi_bench: %s\n", why);
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

/* A clock that costs as little as the one that the other sides use; its unit is known only after the run. */
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
        MPI_Recv(job->in, job->size, MPI_BYTE, job->peer, PAYLOAD, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else {
        MPI_Recv(job->in, job->size, MPI_BYTE, job->peer, PAYLOAD, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Send(job->out, job->size, MPI_BYTE, job->peer, PAYLOAD, MPI_COMM_WORLD);
    }
}

static void one_barrier(const struct job *job)
{
    (void)job;
    MPI_Barrier(MPI_COMM_WORLD);
}

/* Times each repetition; `share` is the part of one that counts: half of a round trip, all of a barrier. */
static void repeat(const struct job *job, const char *name, void (*step)(const struct job *), double share)
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
    printf("{\"test\":\"%s\",\"size\":%d,\"iterations\":%ld,\"latency_us\":{\"min\":%.5f,\"mean\":%.5f,"
           "\"p50\":%.5f,\"p99\":%.5f,\"max\":%.5f},\"bandwidth_gbps\":null,\"rate_mps\":null}\n",
           name, job->size, count, us * (double)took[0], seconds * 1e6 * share / (double)count,
           us * (double)took[count / 2], us * (double)took[count - 1 - count / 100],
           us * (double)took[count - 1]);
}

static void send_windows(const struct job *job, long windows)
{
    static MPI_Request sends[WINDOWS][WINDOW], acks[WINDOWS];
    for (long w = 0; w < windows + WINDOWS; w++) {
        int lane = (int)(w % WINDOWS);
        if (w >= WINDOWS && w - WINDOWS < windows) {
            MPI_Waitall(WINDOW, sends[lane], MPI_STATUSES_IGNORE);
            MPI_Wait(&acks[lane], MPI_STATUS_IGNORE);
        }
        if (w >= windows)
            continue;
        MPI_Irecv(NULL, 0, MPI_BYTE, job->peer, ACK, MPI_COMM_WORLD, &acks[lane]);
        for (int i = 0; i < WINDOW; i++)
            MPI_Isend(job->out, job->size, MPI_BYTE, job->peer, PAYLOAD, MPI_COMM_WORLD, &sends[lane][i]);
    }
}

static void post_window(const struct job *job, MPI_Request *receives)
{
    for (int i = 0; i < WINDOW; i++)
        MPI_Irecv(job->in, job->size, MPI_BYTE, job->peer, PAYLOAD, MPI_COMM_WORLD, &receives[i]);
}

static void receive_windows(const struct job *job, long windows)
{
    static MPI_Request receives[WINDOWS][WINDOW];
    for (long w = 0; w < WINDOWS && w < windows; w++)
        post_window(job, receives[w]);
    for (long w = 0; w < windows; w++) {
        MPI_Request *window = receives[w % WINDOWS];
        MPI_Waitall(WINDOW, window, MPI_STATUSES_IGNORE);
        /* Posted before the window is acknowledged: a message of a timed window is never unexpected. */
        if (w + WINDOWS < windows)
            post_window(job, window);
        MPI_Send(NULL, 0, MPI_BYTE, job->peer, ACK, MPI_COMM_WORLD);
    }
}

static void stream(const struct job *job, const char *name)
{
    void (*side)(const struct job *, long) = job->rank == 0 ? send_windows : receive_windows;
    long windows = (job->iterations + WINDOW - 1) / WINDOW;
    side(job, windows / 10 + 1);
    MPI_Barrier(MPI_COMM_WORLD);

    double began = MPI_Wtime();
    side(job, windows);
    double rate = (double)(windows * WINDOW) / (MPI_Wtime() - began);
    if (job->rank == 0)
        printf("{\"test\":\"%s\",\"size\":%d,\"iterations\":%ld,\"latency_us\":null,"
               "\"bandwidth_gbps\":%.5f,\"rate_mps\":%.5f}\n",
               name, job->size, windows * WINDOW, rate * job->size / 1e9, rate / 1e6);
}

int main(int argc, char **argv)
{
    struct job job;
    int ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &job.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc != 4)
        give_up("three arguments, please: latency|bandwidth|rate|barrier SIZE ITERATIONS");
    const char *test = argv[1];
    long size = atol(argv[2]);
    job.iterations = atol(argv[3]);
    if (size < 0 || size > 1L << 30 || job.iterations < 1)
        give_up("SIZE is from 0 to 2^30, and ITERATIONS at least 1");
    int is_barrier = strcmp(test, "barrier") == 0;
    if (!is_barrier && ranks != 2)
        give_up("this test is between two ranks: start it with -n 2");
    job.peer = 1 - job.rank;
    job.size = (int)size;
    job.out = pages((size_t)size);
    job.in = pages((size_t)size);

    if (is_barrier)
        repeat(&job, test, one_barrier, 1.0);
    else if (strcmp(test, "latency") == 0)
        repeat(&job, test, one_round_trip, 0.5);
    else if (strcmp(test, "bandwidth") == 0 || strcmp(test, "rate") == 0)
        stream(&job, test);
    else
        give_up("this test is unknown: there are latency, bandwidth, rate and barrier");
    MPI_Finalize();
    return 0;
}
