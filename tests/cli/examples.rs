//! The examples, as a user starts them: several processes under the launcher, which verify their
//! results.

#[allow(dead_code, reason = "of the example's equation a part is tested here")]
#[path = "../../examples/halo_2d/heat.rs"]
mod heat;

use crate::support::built::{carrack, examples};
use crate::support::children::unset;
use std::process::Command;

/// Runs an example on `ranks` ranks, and returns its lines.
fn run(example: &str, ranks: u32) -> Vec<String> {
    run_with(example, ranks, &[])
}

/// Runs an example like [`run`], with arguments of its own.
fn run_with(example: &str, ranks: u32, args: &[&str]) -> Vec<String> {
    let program = examples().join(example);
    let mut command = Command::new(carrack());
    command
        .args(["run", "-n", &ranks.to_string(), "--timeout", "100", "--"])
        .arg(program)
        .args(args);
    printed(command, &format!("{example} on {ranks}"))
}

/// Runs an example by itself, without a launcher.
fn run_alone(example: &str) -> Vec<String> {
    printed(Command::new(examples().join(example)), example)
}

fn printed(mut command: Command, what: &str) -> Vec<String> {
    let output = unset(&mut command, &[]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{what}: {}\n{text}{errors}", output.status);
    text.lines().map(str::to_owned).collect()
}

#[test]
fn four_processes_fill_an_array_together_and_each_finds_all_of_it() {
    let lines = run("distributed_array", 4);
    assert_eq!(
        lines.iter().filter(|line| line.contains("400000 words, all right")).count(),
        4,
        "{lines:?}"
    );
}

#[test]
fn four_processes_share_a_hash_table_without_losing_a_key() {
    let lines = run("hash_table", 4);
    assert_eq!(
        lines.iter().filter(|line| line.contains("16384 keys found")).count(),
        4,
        "{lines:?}"
    );
}

#[test]
fn four_processes_steal_work_until_the_whole_tree_is_searched() {
    assert!(!run("work_stealing", 4).is_empty());
}

#[test]
fn processes_that_exchange_rows_with_their_neighbours_compute_what_one_does_alone() {
    for ranks in [1, 4, 7] {
        let lines = run("stencil", ranks);
        let right = lines
            .iter()
            .filter(|line| line.contains("after 100 steps as if computed alone"))
            .count();
        assert_eq!(right, ranks as usize, "{lines:?}");
    }
}

#[test]
fn processes_pass_blocks_round_a_ring_of_gpus_in_the_order_of_streams() {
    for ranks in [1, 2, 3] {
        let lines = run("stream_ordered", ranks);
        let right = lines
            .iter()
            .filter(|line| line.contains("200 steps of 1 MiB") && line.contains("all right"));
        assert_eq!(right.count() as u32, ranks, "{lines:?}");
    }
}

#[test]
fn a_heat_equation_on_a_grid_of_gpus_is_what_one_cpu_computes() {
    let folder = std::env::temp_dir().join(format!("carrack-halo-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for (ranks, grid) in
        [(1, "of 1 x 1"), (2, "of 1 x 2"), (4, "of 2 x 2"), (3, "of 1 x 3"), (5, "of 1 x 5")]
    {
        let picture = folder.join(format!("{ranks}.svg"));
        let lines = run_with("halo_2d", ranks, &["24", "12", picture.to_str().unwrap()]);
        let right = lines.iter().filter(|line| {
            line.contains(grid)
                && line.contains("60 steps as one CPU computes them")
                && line.ends_with("all right")
        });
        assert_eq!(right.count() as u32, ranks, "{lines:?}");
        assert_eq!(saying(&lines, "us a step"), ranks as usize, "{lines:?}");
        let svg = std::fs::read_to_string(&picture).unwrap();
        let rows = svg.matches("<rect x=\"0\"").count();
        let wide =
            |rect: &str| rect.split("width=\"").nth(1)?.split('"').next()?.parse::<usize>().ok();
        let squares: usize = svg.split("<rect").skip(1).filter_map(wide).sum();
        assert!(svg.ends_with("</svg>\n"), "{ranks} ranks: {svg}");
        assert_eq!(
            ([rows, squares], svg.contains(&format!("viewBox=\"0 0 {} ", squares / rows))),
            ([64, 64 * 64], true)
        );
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_field_with_a_wrong_cell_one_that_is_no_number_or_one_too_few_is_far_from_what_is_wanted() {
    let wanted = heat::alone([10..30, 0..40], [60, 80], 25);
    assert_eq!(heat::distance(&wanted, &wanted), 0.0);
    for (wrong, least) in
        [(wanted[333] + 1e-9, 0.9e-9), (f64::NAN, f64::INFINITY), (f64::INFINITY, f64::INFINITY)]
    {
        let mut found = wanted.clone();
        found[333] = wrong;
        assert!(heat::distance(&found, &wanted) >= least, "{wrong}");
    }
    assert_eq!(heat::distance(&wanted[1..], &wanted), f64::INFINITY);
    // A part equals the same part of the whole, at any boundaries.
    let whole = heat::alone([0..60, 0..80], [60, 80], 25);
    let part: Vec<f64> = (10..30).flat_map(|row| whole[row * 80..row * 80 + 40].to_vec()).collect();
    assert!(
        part == wanted
            && whole.iter().any(|&cell| cell > 0.9)
            && wanted.iter().any(|&cell| cell > 0.1)
    );
}

#[test]
fn a_field_that_is_no_field_is_refused_with_what_to_write() {
    let wrong: [(&[&str], &str); 6] = [
        (&["2"], "2 cells each way"),
        (&["64", "0"], "0 steps"),
        (&["many"], "many is no number of cells"),
        (&["64", "1.5"], "1.5 is no number of steps"),
        (&["99999"], "3 to 32768"),
        (&["64", "5", "a.svg", "b"], "b is one argument too many"),
    ];
    for (args, why) in wrong {
        let output = Command::new(examples().join("halo_2d")).args(args).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && said.contains(why) && said.contains("halo_2d [CELLS"),
            "{args:?}: {said}"
        );
    }
}

#[test]
fn ranks_that_were_started_with_different_arguments_say_so_and_do_not_wait() {
    for theirs in ["16 3", "8 2", "8 3 /dev/null"] {
        let mut command = Command::new(carrack());
        command.args(["run", "-n", "2", "--timeout", "100", "--", "sh", "-c"]);
        let halo = examples().join("halo_2d").display().to_string();
        command.arg(format!(
            "if [ $CARRACK_RANK = 0 ]; then exec {halo} 8 3; else exec {halo} {theirs}; fi"
        ));
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && output.status.code() != Some(124), "{theirs}: {said}");
        assert!(said.contains("different arguments"), "{theirs}: {said}");
    }
}

#[test]
fn settings_that_make_no_sense_are_told_in_words_and_once() {
    let mut command = Command::new(examples().join("halo_3d"));
    let output = command.env("CARRACK_GPU_COPIER", "maybe").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && said.contains("CARRACK_GPU_COPIER=maybe cannot be read"),
        "{said}"
    );
    assert!(!said.contains("Error:") && said.matches("maybe").count() == 1, "{said}");
}

#[test]
fn a_picture_that_cannot_be_written_is_an_error_and_no_rank_waits_for_the_one_that_has_it() {
    let args = ["24", "2", "/proc/no such folder/field.svg"];
    let alone = Command::new(examples().join("halo_2d"));
    let mut launched = Command::new(carrack());
    launched.args(["run", "-n", "3", "--timeout", "100", "--"]).arg(examples().join("halo_2d"));
    for mut command in [alone, launched] {
        let output = command.args(args).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && output.status.code() != Some(124),
            "{:?}: {said}",
            output.status
        );
        assert!(said.contains("no such folder/field.svg"), "{said}");
    }
}

#[test]
fn four_processes_await_each_others_blocks_and_sums() {
    for ranks in [1, 4] {
        let lines = run("futures", ranks);
        assert_eq!(
            lines.iter().filter(|line| line.contains("all right")).count() as u32,
            ranks,
            "{lines:?}"
        );
    }
}

#[test]
fn messages_lie_on_a_gpu_simulated_where_there_is_none() {
    for ranks in [1, 2, 3] {
        let lines = run("am_into_gpu", ranks);
        let right = lines.iter().filter(|line| {
            line.contains("messages lay in memory of") && line.ends_with("all right")
        });
        assert_eq!(right.count() as u32, ranks, "{lines:?}");
    }
}
/// Returns the number of lines that contain `what`.
fn saying(lines: &[String], what: &str) -> usize {
    lines.iter().filter(|line| line.contains(what)).count()
}

#[test]
fn two_ranks_send_gpu_memory_to_and_fro_in_one_process_or_two() {
    for lines in [run("gpu_pingpong", 2), run_alone("gpu_pingpong")] {
        assert!(names_gpus(&lines[0]), "{lines:?}");
        assert_eq!(saying(&lines, "us one way"), 5, "{lines:?}");
        assert_eq!(saying(&lines, "all 5 sizes came back unchanged"), 2, "{lines:?}");
    }
}

#[test]
fn the_gpus_of_one_process_pass_tokens_around() {
    let lines = run_alone("ring_p2p");
    assert!(names_gpus(&lines[0]), "{lines:?}");
    assert!(lines.last().unwrap().ends_with("GPUs and came back unchanged"), "{lines:?}");
}

#[test]
fn a_process_for_each_gpu_passes_tokens_around() {
    for ranks in [2, 5] {
        let lines = run("ring_ipc", ranks);
        assert!(lines.iter().any(|line| names_gpus(line)), "{lines:?}");
        let right = saying(&lines, &format!(": {ranks} tokens of 1048576 bytes came unchanged"));
        assert_eq!(right, ranks as usize, "{lines:?}");
    }
    assert_eq!(saying(&run_alone("ring_ipc"), ": 2 tokens of 1048576 bytes came unchanged"), 2);
}

#[test]
fn ranks_that_put_layers_of_a_bar_to_their_neighbours_compute_what_one_does_alone() {
    for ranks in [1, 2, 5] {
        let lines = run_with("halo_3d", ranks, &["12", "8"]);
        assert!(lines.iter().any(|line| names_gpus(line)), "{lines:?}");
        assert_eq!(saying(&lines, "12³ cells: "), ranks as usize, "{lines:?}");
        assert_eq!(
            saying(&lines, "layers after 20 steps as if computed alone"),
            ranks as usize,
            "{lines:?}"
        );
    }
    assert_eq!(saying(&run_alone("halo_3d"), "layers after 20 steps as if computed alone"), 2);
}

#[test]
fn the_ranks_of_a_node_have_an_array_on_one_gpu_together() {
    for (lines, ranks) in [(run("shared_allocator", 3), 3), (run_alone("shared_allocator"), 2)] {
        assert!(lines.iter().any(|line| names_gpus(line)), "{lines:?}");
        assert_eq!(
            saying(&lines, &format!("of {ranks} are on this node; memory lies on rank 0's GPU-")),
            1,
            "{lines:?}"
        );
        assert_eq!(
            saying(&lines, &format!("5 steps on 1048576 bytes of {ranks} ranks, all right")),
            ranks,
            "{lines:?}"
        );
    }
}

#[test]
fn a_list_grows_on_gpus_as_others_append_to_it_and_shrinks_again() {
    for (lines, ranks) in [(run("growable_buffer", 3), 3), (run_alone("growable_buffer"), 2)] {
        assert_eq!(saying(&lines, "has put over two stripes"), ranks, "{lines:?}");
        assert!(lines.iter().any(|line| names_gpus(line)), "{lines:?}");
        assert_eq!(saying(&lines, "8 stripes on"), 1, "{lines:?}");
        let refused =
            "all right; the buffer cannot shrink to 4194304 bytes: its first 33554432 are in use";
        assert_eq!(saying(&lines, refused), 1, "{lines:?}");
        assert_eq!(saying(&lines, "and 4194304 bytes again, where they were"), 1, "{lines:?}");
        assert_eq!(
            saying(&lines, "may do with another list what they may, and no more"),
            1,
            "{lines:?}"
        );
    }
}

/// Returns `true` if a line names the GPUs of an example, and calls simulated ones simulated.
fn names_gpus(line: &str) -> bool {
    let is_fake = line.contains("Fake");
    line.contains("on ")
        && line.contains("GPU(s)")
        && is_fake == line.contains("simulated GPU(s), no real one")
}
