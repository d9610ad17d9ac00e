//! An MPI program whose world, and each half of it, is a job of Carrack: `mpiexec -n 4 mpi_halves`.

use carrack::{Rank, Runtime, Tag};
use mpi::topology::Color;
use mpi::traits::Communicator;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let universe = mpi::initialize().ok_or("MPI starts once")?;
    let world = universe.world();
    let half = world.split_by_color(Color::with_value(world.rank() % 2)).ok_or("a half")?;
    let (all, half) = (Runtime::from_mpi(&world)?, Runtime::from_mpi(&half)?);
    for job in [&all, &half] {
        let (rank, size) = (job.rank().0, job.size());
        let sent = job.allgather(&rank.to_le_bytes())?;
        assert_eq!(sent, (0..size).map(|rank| rank.to_le_bytes().to_vec()).collect::<Vec<_>>());
        job.post_send(Rank((rank + 1) % size), rank.to_le_bytes().to_vec(), Tag(1)).submit()?;
        let from = Rank((rank + size - 1) % size);
        let status = job.post_recv(from, vec![0; 4], Tag(1)).wait()?;
        assert_eq!(status.bytes(), Some(&from.0.to_le_bytes()[..]));
    }
    all.barrier()?;
    println!("{} of {}; {} of {}", all.rank(), all.size(), half.rank(), half.size());
    Ok(())
}
